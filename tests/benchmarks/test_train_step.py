"""The step benchmark runs without vLLM and DeepSpeed, and counts what it says it counts. Never how fast."""

import json
import os
import subprocess

import torch
from torch.utils.flop_counter import FlopCounterMode

from drafthead.config import REPO_ROOT
from tests.scripts import run_python


def run_benchmark(directory, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run the benchmark where neither vLLM nor DeepSpeed can be imported, in its contestants' processes either."""
    blocked = "import sys\nsys.modules.update(dict.fromkeys(('vllm', 'deepspeed')))\n"
    (directory / "sitecustomize.py").write_text(blocked)
    path = os.pathsep.join([str(directory), str(REPO_ROOT)])
    return run_python("benchmarks/train_step.py", *arguments, PYTHONPATH=path, **variables)


def test_the_tiny_shape_runs_without_vllm_and_deepspeed(tmp_path):
    target = tmp_path / "result.json"
    result = run_benchmark(
        tmp_path, "--shape", "tiny", "--contestants", "ours", "--rounds", "2", "--threads", "1", "--json", str(target)
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads(target.read_text())
    (row,) = summary["contestants"]
    assert not summary["failed"]
    assert row["per_second"] > 0
    assert len(row["seconds"]) == 2
    assert row["memory_bytes"] > 0
    assert row["memory_before_bytes"] > row["memory_bytes"]
    assert len(row["loss_per_position"]) == summary["shape"]["ttt_steps"]
    assert all(0 < loss < 10 for loss in row["loss_per_position"])
    assert summary["matmul_peak_flops_per_second"] > 0
    assert summary["made_by"]["versions"]["torch"] == torch.__version__
    assert "tokens/s" in result.stdout


def test_a_step_of_another_drafter_counts_its_rows(tmp_path):
    target = tmp_path / "result.json"
    asked = ("--drafter", "peagle", "--shape", "tiny", "--contestants", "ours,specforge", "--rounds", "1")
    result = run_benchmark(tmp_path, *asked, "--threads", "1", "--json", str(target))
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(target.read_text())["contestants"]
    assert row["rows"] == 2 * (22 + 15 + 10)  # 24 tokens: 22, 21 and 20 roots have a teacher at positions 0 to 2
    assert row["flops"] > 0
    assert row["over_products"] > 1
    assert "specforge trains no peagle" in result.stderr


def test_the_formula_counts_the_matrix_products_of_a_step(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(REPO_ROOT / "benchmarks"))  # as its script has it
    from stepbench import contestant, inputs, ours, shapes

    shape = shapes.Shape("test", 32, 64, 4, 2, 8, vocab=96, draft_vocab=48, tokens=256, batch=1, ttt_steps=3)
    inputs.write_inputs(shape, tmp_path)
    tensors = contestant.load_file(tmp_path / "tensors.safetensors")
    target = tmp_path / "target"
    step = ours.build(contestant.Assignment(shape, "cpu", "packed", "eagle3", tensors, target))
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    counted = counts[torch.ops.aten.mm] + counts[torch.ops.aten.addmm]
    attention = 6 * shape.tokens_per_step * shapes.attention_macs(shape)
    # The last rows of the document have no loss, so the head leaves 2 + k of 256 out.
    assert 0.98 < counted / (shapes.step_flops(shape) - attention - shapes.spared_flops(shape)) <= 1
