"""Commands of the documentation, run as they stand there: those that no other test runs and no page marks.

RECIPE is the tiny run with a results folder of its own and few requests; a new command needs a placeholder here, a test
of its own in tests/docs/commands.py, or a mark on its page.
"""

from pathlib import Path

import pytest

from drafthead.config import Recipe
from tests.docs.commands import RUN_ELSEWHERE, Command, documented
from tests.pipeline.small_run import SMALL_RUN
from tests.scripts import run_here, run_ok

pytestmark = pytest.mark.slow
# Few prompts and one load: every command runs, and nothing is read off the figures.
FEW = ("eval.methods=[head]", "eval.max_tokens=24", "eval.concurrency=[2]", "eval.prompts_per_level=8")
ENGINES = ("eval/head.py", "eval/explain.py")
# Of a benchmark that takes minutes otherwise; all subjects of scale.py go the same way.
LESS = {
    "benchmarks/harvest.py": ("--sequences", "16", "--blocks", "1"),
    "benchmarks/scale.py": ("--only", "results", "--sizes", "20", "40"),
}
# What a command needs before it, by key.
AFTER = {"eval/report.py": "eval/head.py"}


def to_run() -> dict[str, Command]:
    """Key -> one command of each kind, what others need first."""
    left = {c.key: c for c in documented() if c.script and not c.needs and c.key not in RUN_ELSEWHERE}
    return dict(sorted(left.items(), key=lambda item: (item[0] in AFTER, item[0])))


@pytest.fixture(scope="module")
def folder(tiny_run, tmp_path_factory) -> Path:
    """The tiny run, linked, with room of its own for results and for runs that are imported."""
    root, source = tmp_path_factory.mktemp("docs"), Path(tiny_run.output_dir)
    (root / "runs").mkdir()
    for part in ("data", "heads", "runs/tiny"):
        (root / part).symlink_to(source / part)
    return root


def keyed() -> list:
    """The keys; what starts engines, or needs the results of such a command, is left to `make presets`."""
    starts = (*ENGINES, *AFTER)
    return [pytest.param(k, marks=[pytest.mark.presets] if k.split()[0] in starts else []) for k in to_run()]


@pytest.mark.parametrize("key", keyed())
def test_a_documented_command_runs(key, folder, tiny_run, capsys):
    results = folder / "results" / "tiny"
    first = AFTER.get(key)
    if first and not (results / "report.html").exists():  # this test alone, without the one before it
        run_ok(to_run()[first].script, *filled(to_run()[first], folder, tiny_run))
    command = to_run()[key]
    arguments = filled(command, folder, tiny_run)
    if key in ENGINES:
        printed = run_ok(command.script, *arguments)
    else:
        assert run_here(command.script, *arguments) == 0
        printed = capsys.readouterr().out
    assert printed.strip(), command


def filled(command: Command, folder: Path, tiny_run: Recipe) -> list[str]:
    """The command's arguments with something real in the place of each placeholder."""
    places = {
        "RECIPE": ("configs/tiny.yaml", f"output_dir={folder}", *SMALL_RUN, *FEW),
        "N": ("1",),
        "KEY=...": ("eval.price_per_gpu_hour=5",),
        "OWNER/HEAD": (str(tiny_run.head_dir),),
    }
    return [*(p for word in command.arguments for p in places.get(word, (word,))), *LESS.get(command.script, ())]
