"""The command line that every script shares, its status lines, and how errors of users end it."""

import logging

import pytest

from drafthead.cli import recipe_from_command_line, run_recipe, run_script
from drafthead.config import REPO_ROOT
from tests.scripts import forget_status_lines, run_here

logger = logging.getLogger("drafthead.somewhere")


@pytest.fixture(autouse=True)
def _forget_status_lines():
    yield
    forget_status_lines()


def test_overrides_may_follow_a_flag(tmp_path, capsys):
    flags, overrides = ("--dry-run", "--gpus", "2"), (f"output_dir={tmp_path}", "train.batches_per_step=2")
    orders = (
        ("configs/tiny.yaml", *overrides, *flags), ("configs/tiny.yaml", *flags, *overrides),
        (*flags, "configs/tiny.yaml", *overrides), (overrides[0], *flags, overrides[1]),
    )  # fmt: skip
    printed = set()
    for arguments in orders:
        assert run_here("train/eagle3.py", *arguments) == 0
        printed.add(capsys.readouterr().out)
    assert len(printed) == 1


def test_an_override_is_no_value_of_the_flag_before_it(tmp_path, capsys):
    flags = ("--layers", "1", "2", "--heads", "eagle3")
    assert run_here("eval/compare.py", *flags, f"output_dir={tmp_path}", "train.epochs=0") == 1
    assert "train.epochs" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["lr=1e-3/recipe.yaml", "lr=1e-3.yaml"])
def test_a_file_is_no_override(recipe, tmp_path, monkeypatch):
    path = tmp_path / recipe
    path.parent.mkdir(exist_ok=True)
    path.write_text((REPO_ROOT / "configs/tiny.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    arguments = ("--file", recipe, "prompts.seed=3", recipe, "target.aux_layer_ids[0]=1")
    monkeypatch.setattr("sys.argv", ["script", *arguments])
    read, args = recipe_from_command_line(None, ("--file", {}))
    assert (args.file, args.recipe) == (recipe, recipe)
    assert (read.prompts.seed, read.target.aux_layer_ids[0]) == (3, 1)


@pytest.mark.parametrize(("rank", "start"), [(None, ""), ("0", ""), ("3", "[rank 3] ")])
def test_status_lines_go_to_standard_output(rank, start, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    library_logger = logging.getLogger("another.library")
    before = [*logging.getLogger().handlers], library_logger.isEnabledFor(logging.INFO)

    def main() -> None:
        logger.debug("hidden")
        logger.info("%d shards", 3)
        logger.warning("broken")
        assert before == ([*logging.getLogger().handlers], library_logger.isEnabledFor(logging.INFO))

    run_recipe(main)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [f"{start}3 shards", f"{start}WARNING: broken"]
    assert captured.err == ""


def test_a_file_that_torch_cannot_open_is_an_error_of_the_user(capsys):
    def main() -> None:
        raise RuntimeError("unable to open file <x>")

    with pytest.raises(SystemExit) as ended:
        run_recipe(main)
    assert ended.value.code == 1
    assert "unable to open file <x>" in capsys.readouterr().err


def test_a_script_that_fails_ends_the_one_that_runs_it_but_for_the_code_that_is_allowed(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert [run_script(str(script), [code], 3) for code in ("0", "3")] == [0, 3]
    for allowed in (0, 3):
        with pytest.raises(SystemExit, match="2"):
            run_script(str(script), ["2"], allowed)


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_recipe(lambda: 1 / 0)
