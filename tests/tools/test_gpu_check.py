"""The command for GPU machines, as far as it goes without one."""

import shlex
import subprocess

import pytest

from drafthead.config import REPO_ROOT, load_recipe
from drafthead.generation.prompts import make_prompts
from tests.exporting.runs import recipe_at, write_random_head
from tests.scripts import run_here, run_python
from tests.warm import warm
from tools.gpu_check import chosen


def gpu_check(*options: str) -> subprocess.CompletedProcess:
    return run_python("tools/gpu_check.py", *options, PATH="", CUDA_VISIBLE_DEVICES="")


def test_every_command_names_a_script_and_a_recipe_that_load(capsys):
    assert run_here("tools/gpu_check.py", "--list") == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert len(commands) >= 10
    for words in commands:
        assert all((REPO_ROOT / word).is_file() for word in words if word.endswith(".py"))
        overrides = [word for word in words if "=" in word and not word.startswith("VLLM_")]
        for recipe in [word for word in words if word.endswith(".yaml")][:1]:
            load_recipe(REPO_ROOT / recipe, overrides)


@pytest.mark.slow
def test_an_engine_is_what_it_says_it_runs(tmp_path):
    """On a CPU model runner V1, refused where V2 was expected; of a random head next to nothing is accepted."""
    recipe = recipe_at(tmp_path, "prompts.max_train=8", "prompts.max_heldout=4", "prompts.validation=2")
    make_prompts(recipe)
    write_random_head(recipe)
    command = ("tools/gpu_engine.py", f"output_dir={tmp_path}", "eval.methods=[head]", "eval.max_tokens=48")
    for runner, length, code in (("V1", "1", 0), ("V1", "3.9", 1), ("V2", "1", 1)):
        result = warm().run(*command, "--runner", runner, "--length", length)
        assert result.returncode == code, result.stderr
        assert "model runner V1, 0 CUDA graphs" in result.stdout


def test_without_a_gpu_it_says_so_and_an_unknown_check_is_named():
    refused = gpu_check()
    assert refused.returncode == 1
    assert "needs a CUDA GPU" in refused.stderr
    with pytest.raises(SystemExit, match="no check speed; there are kernels, step"):
        chosen("speed")


def test_a_machine_without_vllm_is_checked_in_parts():
    """Here on a CPU, at a small shape: a table with what was expected, seen and found."""
    tried = gpu_check("--without-vllm", "step", "--on-cpu")
    assert tried.returncode == 0, tried.stderr
    assert all(word in tried.stdout for word in ("expected", "step of 256 tokens", "passed"))
