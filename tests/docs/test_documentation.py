"""The documentation against the code: commands parse, keys and paths exist, examples are valid, links work."""

import argparse
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from drafthead.cli import is_override
from drafthead.config import DEFAULT_RECIPE, REPO_ROOT, Recipe, load_recipe
from drafthead.generation.sources import CATALOGUE
from tests.docs.commands import PAGES, RUN_ELSEWHERE, Command, blocks_of, documented

ALL_PAGES = [*PAGES, REPO_ROOT / "benchmarks" / "README.md"]
# Their commands take no recipe.
OF_NO_STAGE = ("benchmarks/", "tools/")
# A placeholder in a documented command -> something of its kind.
PLACEHOLDERS = {
    "RECIPE": "configs/tiny.yaml", "N": "2", "KEY=...": "eval.price_per_gpu_hour=1", "LOW": "2", "HIGH": "3",
}  # fmt: skip


class _ParsedError(Exception):
    """Carries what was parsed out of a script."""


def page_name(page: Path) -> str:
    return str(page.relative_to(REPO_ROOT))


def filled(words: list[str]) -> list[str]:
    """Words of a command with its placeholders filled in."""
    return [PLACEHOLDERS.get(word, word) for word in words]


def parsed(command: Command, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the script's own parser makes of the command; nothing after it runs."""
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def stop(self, *args, parse=original, **kwargs):
            raise _ParsedError(parse(self, *args, **kwargs))

        monkeypatch.setattr(argparse.ArgumentParser, name, stop)
    monkeypatch.setattr("sys.argv", [command.script, *filled(command.arguments)])
    main = importlib.import_module(command.script.removesuffix(".py").replace("/", ".")).main
    with pytest.raises(_ParsedError) as caught:
        main()
    return caught.value.args[0]


def test_there_are_commands_to_look_at():
    assert len(documented()) > 50
    assert {"README.md", "docs/export.md", "docs/states.md"} <= {command.page for command in documented()}


SCRIPTS = [c for c in documented() if c.script.endswith(".py")]


@pytest.mark.parametrize("command", SCRIPTS, ids=str)
def test_a_documented_command_is_one_that_its_script_takes(command, monkeypatch):
    """Also those that need a GPU: flags by the script's own parser, recipe and overrides by the recipe's own model."""
    assert (REPO_ROOT / command.script).is_file()
    if command.script.startswith(OF_NO_STAGE):
        return
    args = parsed(command, monkeypatch)
    load_recipe(REPO_ROOT / args.recipe, [*args.overrides, *filter(is_override, filled(command.arguments))])


@pytest.mark.parametrize("command", [c for c in documented() if c.words[0] == "make"], ids=str)
def test_a_documented_make_target_runs_documented_scripts(command):
    """What it runs is the suite's own tools, or accounted for like any other command."""
    asked = ["make", "--dry-run", "--always-make", "--no-print-directory", *command.words[1:]]
    printed = subprocess.run(asked, cwd=REPO_ROOT, capture_output=True, text=True, check=True).stdout
    for line in printed.replace("\\\n", " ").splitlines():
        step = Command(command.page, command.line, tuple(shlex.split(line)))
        if step.script and not step.script.startswith((*OF_NO_STAGE, "tests/")):
            assert (REPO_ROOT / step.script).is_file(), step
            assert step.key in RUN_ELSEWHERE or step.key in {c.key for c in documented()}, step


def test_clean_deletes_what_runs_wrote_and_spares_downloads(tmp_path):
    for name in ("data/sources/a", "data/tiny/prompts", "runs/tiny", "heads/tiny", "results/tiny", "adapt/tiny"):
        (tmp_path / name).mkdir(parents=True)
    subprocess.run(["make", "--file", REPO_ROOT / "Makefile", "clean"], cwd=tmp_path, check=True, capture_output=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"data", "data/sources", "data/sources/a"}


@pytest.mark.parametrize("job", sorted((REPO_ROOT / "docs" / "slurm").glob("*.sbatch")), ids=page_name)
def test_a_job_file_runs_scripts_that_take_its_flags(job, monkeypatch):
    subprocess.run(["bash", "-n", job], check=True)
    lines = [line for line in job.read_text().splitlines() if line.startswith(('"$PYTHON" ', "on_cluster "))]
    assert len(lines) > 1
    for line in lines:
        words = shlex.split(line.replace('"$@"', "configs/gpt-oss-120b.yaml"))
        assert parsed(Command(page_name(job), 0, tuple(words)), monkeypatch).recipe == "configs/gpt-oss-120b.yaml"


def test_only_what_this_project_does_not_install_goes_unrun():
    """A command of another program is marked with what it needs."""
    for command in documented():
        if not command.script and command.words[0] != "make" and command.key not in RUN_ELSEWHERE:
            assert command.needs, f"{command}: mark it <!-- not run: needs ... --> or have a test run it"


@pytest.mark.parametrize("page", ALL_PAGES, ids=page_name)
def test_every_key_that_is_named_exists(page):
    models = {name: field.annotation for name, field in Recipe.model_fields.items()}
    sections = {name: model for name, model in models.items() if hasattr(model, "model_fields")}
    for match in re.finditer(r"`(\w+)\.([a-z_]+)(?:\.\w+)*(?:[=:` ])", page.read_text()):
        section, key = match.groups()
        if section in sections and key not in ("py", "yaml"):
            fields = sections[section].model_fields
            names = set(fields) | {field.alias for field in fields.values()}
            assert key in names, f"{page_name(page)} names {section}.{key}, which drafthead/config/ does not have"


@pytest.mark.parametrize("page", ALL_PAGES, ids=page_name)
def test_every_path_that_is_named_exists(page):
    # As written from the checkout; what runs write (data, runs, heads, results) is no part of it.
    roots = "drafthead|tests|tools|benchmarks|configs|docs|data_gen|train|export|eval|requirements"
    for path in re.findall(rf"`(?:python )?((?:{roots})/[\w./*-]+)", page.read_text()):
        assert list(REPO_ROOT.glob(path.rstrip("/."))), f"{page_name(page)} names {path}, which does not exist"


def test_every_source_is_in_the_table():
    listed = set(re.findall(r"^\| `([\w-]+)` \|", (REPO_ROOT / "docs" / "prompts.md").read_text(), flags=re.MULTILINE))
    assert listed == set(CATALOGUE)


@pytest.mark.parametrize("page", ALL_PAGES, ids=page_name)
def test_every_link_leads_somewhere(page):
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page_name(page)}: [{text}]({target})"
        if anchor:
            assert anchor in _anchors(there), f"{page_name(page)}: {target} has no such heading"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _examples() -> list[tuple[str, dict]]:
    examples = []
    for page in ALL_PAGES:
        blocks = (block for _, block, _ in blocks_of(page.read_text()) if re.match(r"\w+:", block))
        for part in (part for block in blocks for part in re.split(r"\n\n(?=\w+:)", block)):  # alternatives
            examples.append((page_name(page), yaml.safe_load(part)))
    return examples


@pytest.mark.parametrize(("page", "example"), _examples(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_yaml_example_is_part_of_a_valid_recipe(page, example):
    base = yaml.safe_load(DEFAULT_RECIPE.read_text())
    base["engine"]["max_model_len"] = 1 << 17
    for section, settings in example.items():
        assert section in Recipe.model_fields, f"{page}: {section}"
        base[section] = settings if section == "prompts" else {**base[section], **settings}
    Recipe.model_validate(base)
