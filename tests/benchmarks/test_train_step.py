"""The step benchmark runs without vLLM and DeepSpeed, and counts what it says it counts. Never how fast."""

import importlib
import json
import os
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
    names = ("contestant", "inputs", "memory", "ours", "referee", "results", "shapes")
    yield {name: importlib.import_module(f"stepbench.{name}") for name in names}
    for name in [name for name in sys.modules if name.split(".")[0] == "stepbench"]:
        del sys.modules[name]


def test_a_step_is_measured_without_vllm_and_deepspeed_beside_peers_that_cannot_run(tmp_path):
    """One that does not train this drafter, and one that fails: without a network no environment can be made.

    Neither vLLM nor DeepSpeed can be imported, in the contestants' processes either.
    """
    blocked = "import sys\nsys.modules.update(dict.fromkeys(('vllm', 'deepspeed')))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    path = os.pathsep.join([str(tmp_path), str(REPO_ROOT)])
    target, envs = tmp_path / "result.json", tmp_path / "envs"
    asked = ("--drafter", "peagle", "--shape", "tiny", "--contestants", "ours,specforge,speculators", "--rounds", "2")
    options = ("--threads", "1", "--json", str(target), "--envs", str(envs))
    result = run_python("benchmarks/train_step.py", *asked, *options, PYTHONPATH=path, PIP_NO_INDEX="1")
    assert result.returncode == 1
    assert "specforge trains no peagle" in result.stderr
    assert "failed installing speculators==0.9.0" in result.stderr
    summary = json.loads(target.read_text())
    assert [*summary["failed"]] == ["speculators"]
    (row,) = summary["contestants"]
    assert row["name"] == "ours packed"
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
    first = parts["contestant"]._first(step, "cpu")
    entry = parts["referee"].Entry("ours packed", first=first, seconds=[2.0], over_products=[1.5])
    (row,) = parts["results"].summarise(shape, "eagle3", [entry], peak=1e9, entropy=0.0)["contestants"]
    assert (row["per_second"], row["flops"]) == (128, shapes.step_flops(shape))  # every token of every step counts
    assert parts["results"].cells(row)[-1] == f"{first['losses'][0]:.4f}"


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
