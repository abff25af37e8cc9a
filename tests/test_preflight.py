"""What later stages need is asked by the first command, whichever it is: exit code, and what the message names."""

import pytest

from tests.scripts import run_here

PROMPTS, PLAN, TRAIN = "data_gen/prompts.py", "data_gen/dry_run.py", "train/eagle3.py"


def refused(capsys: pytest.CaptureFixture, script: str, *arguments: str) -> str:
    """Run a command that must be refused; returns the message."""
    capsys.readouterr()
    assert run_here(script, *arguments) == 2
    message = capsys.readouterr().err.strip()
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    "overrides",
    [
        ("head.draft_vocab_size=9999999",),
        ("target.aux_layer_ids=[2,4,9]",),
        ("head.type=dflash", "head.mask_token_id=3072"),
    ],
)
@pytest.mark.parametrize("script", [PROMPTS, PLAN, TRAIN])
def test_what_lies_beyond_the_target(tmp_path, capsys, script, overrides):
    message = refused(capsys, script, f"output_dir={tmp_path}", *overrides)
    key, _, value = overrides[-1].partition("=")
    assert key in message
    assert value.strip("[]").split(",")[-1] in message
    assert not list(tmp_path.iterdir())


def test_a_plan_needs_config_json_and_nothing_else_of_a_target(tmp_path, target):
    for path in target.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert run_here(PLAN, f"output_dir={tmp_path}", f"target.path={target}") == 0
