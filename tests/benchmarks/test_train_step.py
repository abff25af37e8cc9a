"""The step benchmark runs without vLLM and DeepSpeed, and counts what it says it counts. Never how fast."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from drafthead.config import REPO_ROOT
from tests.scripts import run_python

BENCHMARKS = REPO_ROOT / "benchmarks"


@pytest.fixture
def parts(monkeypatch):
    """The benchmark's own modules, importable as they are from its script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from stepbench import contestant, inputs, memory, ours, shapes

    yield {"contestant": contestant, "inputs": inputs, "memory": memory, "ours": ours, "shapes": shapes}
    for name in [name for name in sys.modules if name.split(".")[0] == "stepbench"]:
        del sys.modules[name]


def run_benchmark(directory, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run the benchmark where neither vLLM nor DeepSpeed can be imported, in its contestants' processes either."""
    blocked = "import sys\nsys.modules.update(dict.fromkeys(('vllm', 'deepspeed')))\n"
    (directory / "sitecustomize.py").write_text(blocked)
    path = os.pathsep.join([str(directory), str(REPO_ROOT)])
    return run_python("benchmarks/train_step.py", *arguments, PYTHONPATH=path, **variables)


def test_a_step_runs_without_vllm_and_deepspeed_and_counts_its_rows(tmp_path):
    target = tmp_path / "result.json"
    asked = ("--drafter", "peagle", "--shape", "tiny", "--contestants", "ours,specforge", "--rounds", "2")
    result = run_benchmark(tmp_path, *asked, "--threads", "1", "--json", str(target))
    assert result.returncode == 0, result.stderr
    summary = json.loads(target.read_text())
    (row,) = summary["contestants"]
    assert row["rows"] == 2 * (22 + 15 + 10)  # 24 tokens: 22, 21 and 20 roots have a teacher at positions 0 to 2
    assert row["flops"] > 0
    assert row["over_products"] > 1
    assert row["per_second"] > 0
    assert len(row["seconds"]) == 2
    assert row["memory_before_bytes"] > row["memory_bytes"] > 0
    assert len(row["loss_per_position"]) == 3
    assert all(0 < loss < 10 for loss in row["loss_per_position"])
    assert summary["matmul_peak_flops_per_second"] > 0
    assert summary["made_by"]["versions"]["torch"] == torch.__version__
    assert "specforge trains no peagle" in result.stderr


def test_a_contestant_that_fails_is_named_and_the_others_are_measured(tmp_path):
    target, envs = tmp_path / "result.json", tmp_path / "envs"  # without a network none can be made there
    asked = ("--shape", "tiny", "--contestants", "ours,speculators", "--rounds", "1", "--envs", str(envs))
    result = run_benchmark(tmp_path, *asked, "--threads", "1", "--json", str(target), PIP_NO_INDEX="1")
    assert result.returncode == 1
    assert "failed installing speculators==0.9.0" in result.stderr
    summary = json.loads(target.read_text())
    assert [row["name"] for row in summary["contestants"]] == ["ours packed"]
    assert [*summary["failed"]] == ["speculators"]


def test_the_formula_counts_the_matrix_products_of_a_step(parts, tmp_path):
    shapes = parts["shapes"]
    shape = shapes.Shape("test", 32, 64, 4, 2, 8, vocab=96, draft_vocab=48, tokens=256, batch=1, ttt_steps=3)
    parts["inputs"].write_inputs(shape, tmp_path)
    tensors = parts["contestant"].load_file(tmp_path / "tensors.safetensors")
    target = tmp_path / "target"
    step = parts["ours"].build(parts["contestant"].Assignment(shape, "cpu", "packed", "eagle3", tensors, target))
    with FlopCounterMode(display=False) as counter:
        step()
    assert parts["contestant"]._round(step, "cpu")["flops"] == counter.get_total_flops()
    counts = counter.get_flop_counts()["Global"]
    counted = counts[torch.ops.aten.mm] + counts[torch.ops.aten.addmm]
    attention = 6 * shape.tokens_per_step * shapes.attention_macs(shape)
    # Our step forms the embeddings' half of q, k and v once, not in each of K TTT steps.
    half = shape.hidden * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    spared = 6 * shape.tokens_per_step * half * (shape.ttt_steps - 1)
    # The last rows of the document have no loss, so the head leaves 2 + k of 256 out.
    assert 0.98 < counted / (shapes.step_flops(shape) - attention - spared) <= 1


def test_the_formula_counts_each_pair_of_query_and_key_once(parts):
    shapes = parts["shapes"]
    shape = shapes.SHAPES["tiny"]
    pairs = sum(t + 1 + k for k in range(shape.ttt_steps) for t in range(shape.tokens))
    macs_per_pair = 2 * shape.heads * shape.head_dim  # score and weighted sum
    assert shapes.attention_macs(shape) * shape.tokens == pairs * macs_per_pair


def test_memory_counts_what_is_allocated_inside(parts):
    with parts["memory"].PeakMemory("cpu") as memory:
        torch.ones(2**24)  # 64 MiB, freed at once
    assert 0.95 * 2**26 < memory.needed < 1.2 * 2**26  # the kernel counts in batches of pages
