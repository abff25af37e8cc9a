"""The command line that every script shares, its status lines, and how errors of users end it."""

import errno
import logging

import pytest

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import REPO_ROOT
from tests.scripts import forget_status_lines, run_here

logger = logging.getLogger("drafthead.somewhere")


@pytest.fixture(autouse=True)
def _forget_status_lines():
    yield
    forget_status_lines()


@pytest.mark.parametrize("flags", [("--dry-run",), ("--dry-run", "--gpus", "2")])
@pytest.mark.parametrize("script", ["data_gen/harvest.py", "train/eagle3.py"])
def test_overrides_may_follow_a_flag(script, flags, tmp_path, capsys):
    overrides = (f"output_dir={tmp_path}", "train.batches_per_step=2")
    orders = (
        ("configs/tiny.yaml", *overrides, *flags), ("configs/tiny.yaml", *flags, *overrides),
        (*flags, "configs/tiny.yaml", *overrides), (overrides[0], *flags, overrides[1]),
    )  # fmt: skip
    printed = set()
    for arguments in orders:
        assert run_here(script, *arguments) == 0
        printed.add(capsys.readouterr().out)
    assert len(printed) == 1


@pytest.mark.parametrize("flags", [("--seeds", "0"), ("--layers", "1", "2", "--heads", "eagle3")])
def test_an_override_is_no_value_of_the_flag_before_it(flags, tmp_path, capsys):
    assert run_here("eval/compare.py", *flags, f"output_dir={tmp_path}", "train.epochs=0") == 2
    assert "train.epochs" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["lr=1e-3/recipe.yaml", "lr=1e-3.yaml"])
def test_a_file_is_no_override(recipe, tmp_path, monkeypatch):
    path = tmp_path / recipe
    path.parent.mkdir(exist_ok=True)
    path.write_text((REPO_ROOT / "configs/tiny.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    given = ("--file", recipe, "prompts.seed=3", recipe, "target.aux_layer_ids[0]=1")
    monkeypatch.setattr("sys.argv", ["script", *given])
    read, args = recipe_from_command_line(None, ("--file", {}))
    assert (args.file, args.recipe) == (recipe, recipe)
    assert (read.prompts.seed, read.target.aux_layer_ids[0]) == (3, 1)


def test_an_unknown_flag_ends_with_code_2(capsys):
    assert run_here("data_gen/harvest.py", "--dry-run", "configs/tiny.yaml", "--nope") == 2
    assert "--nope" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "start"), [(None, ""), ("0", ""), ("3", "[rank 3] ")])
def test_status_lines_go_to_standard_output(rank, start, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    others = logging.getLogger("another.library")
    before = [*logging.getLogger().handlers], others.isEnabledFor(logging.INFO)

    def main() -> None:
        logger.debug("hidden")
        logger.info("%d shards", 3)
        logger.warning("broken")
        assert before == ([*logging.getLogger().handlers], others.isEnabledFor(logging.INFO))

    run_recipe(main)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [f"{start}3 shards", f"{start}WARNING: broken"]
    assert captured.err == ""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        FileNotFoundError("gone"),
        OSError(errno.ENOSPC, "full"),
        RuntimeError("unable to open file <x>"),
    ],
)
def test_errors_of_users_are_one_message_and_code_2(error, capsys):
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_recipe(main)
    assert ended.value.code == 2
    assert str(error) in capsys.readouterr().err


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_recipe(lambda: 1 / 0)
