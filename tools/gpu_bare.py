"""What a GPU machine without vLLM can show of training, in three parts of at most ten minutes each.

    python tools/gpu_check.py --without-vllm kernels     Triton kernels and flash attention against their references
    python tools/gpu_check.py --without-vllm step        a step at gpt-oss-120b's shape: time, MFU, memory, profile
    python tools/gpu_check.py --without-vllm training    DeepSpeed on synthetic states: learns, resumes, changes ranks

Each prints one table: check, expected, seen, verdict. docs/gpu.md says what such a machine needs installed. Without a
GPU, `--on-cpu` tries the same code at a small shape: its figures mean nothing.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from drafthead.artifacts import file_entries, read_json
from drafthead.config import REPO_ROOT, Recipe, load_recipe
from drafthead.data.shard import StateSequence, first_teacher_row
from drafthead.drafters.base import DraftShape, draft_shape
from drafthead.drafters.batch import PackedBatch, tail_layout
from drafthead.drafters.registry import drafter_of
from drafthead.files import write_json
from drafthead.planning.memory import training_memory
from drafthead.target.pieces import FrozenTarget
from drafthead.target.spec import recipe_spec
from drafthead.training.trainer import LossModule

sys.path.insert(0, str(REPO_ROOT))  # tests' references and synthetic states

# Of a data sheet: dense bf16 TFLOP/s. MFU is never against a rate that was just measured.
DATA_SHEET = {"H100 PCIe": 756, "H100": 989, "H200": 989, "H20": 148, "B200": 2250, "A100": 312}
# What an H100 took (docs/gpu.md): milliseconds of a step, forward and backward, by tokens.
MEASURED_MS = {4096: 96, 8192: 188, 16384: 394}
# Regions of the profile, by names of kernels, the first that fits; and that H100's milliseconds at 8,192 tokens.
REGIONS = {
    "flash attention": (r"flash|fmha", 18.0),
    "matrix products": (r"gemm|cutlass|cublas|nvjet|xmma|mm_", 130.8),
    "loss kernels": (r"score_kernel|target_kernel", 8.2),
    "block kernels": (r"norm_kernel|norm_backward|gated_|rotate_kernel|merge_", 13.0),
    "other": (r"", 15.7),
}


class Row(NamedTuple):
    check: str
    expected: str
    seen: str
    passed: bool


def kernels(on_cpu: bool) -> Iterator[Row]:
    """Cases against their references: natively, or interpreted on a CPU."""
    from tests.scripts import environment

    interpreted = {} if not on_cpu else {"TRITON_INTERPRET": "1"}
    suites = {
        "kernels of the loss": ("tests/losses/kernel_cases.py",),
        "kernels of the block": ("tests/drafters/kernel_cases.py",),
        "at full size, head loss, attention": (
            "-m",
            "requires_gpu",
            "tests/losses",
            "tests/drafters/test_attention.py",
        ),
    }
    for name, arguments in suites.items():
        start = time.perf_counter()
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
        done = subprocess.run(
            command, cwd=REPO_ROOT, capture_output=True, text=True, env=environment(**interpreted), check=False
        )
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n")
        last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
        yield Row(name, "all pass", f"{last} ({time.perf_counter() - start:.0f} s)", done.returncode == 0)


def step(on_cpu: bool) -> Iterator[Row]:
    """Time, MFU and memory of forward and backward at 4k, 8k and 16k tokens; at 8k where the time goes.

    Four documents each; 8k tokens also as one document, whose attention is longer.
    """
    device = torch.device("cpu" if on_cpu else "cuda")
    _config_of_public_targets()
    for tokens, documents in [(256, 4)] if on_cpu else [*((n, 4) for n in MEASURED_MS), (8192, 1)]:
        budget = f"train.tokens_per_batch={tokens}"
        name, overrides = ("tiny", [budget]) if on_cpu else ("gpt-oss-120b", [budget])
        recipe = load_recipe(REPO_ROOT / "configs" / f"{name}.yaml", overrides)
        take, flops = _step_of(recipe, tokens, documents, device)
        take()  # compiles
        seconds = min(_timed(take, device) for _ in range(5))
        most = 1.1 * MEASURED_MS[tokens] if tokens in MEASURED_MS and documents == 4 else None
        yield Row(
            f"step of {tokens} tokens in {documents}", f"<= {most:.0f} ms (an H100 and a tenth)" if most else "",
            f"{1000 * seconds:.0f} ms", most is None or 1000 * seconds <= most,
        )  # fmt: skip
        if on_cpu or documents == 1:
            continue
        name = torch.cuda.get_device_name()
        peak = next((rate for key, rate in DATA_SHEET.items() if key in name), None)
        mfu = flops / seconds / (peak * 1e12) if peak else None
        yield Row(
            f"MFU, {tokens} tokens", ">= 50 % of the data sheet", f"{mfu:.1%}" if mfu else f"no data sheet of {name}",
            bool(mfu and mfu >= 0.5),
        )  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        take()
        gib, parts = torch.cuda.max_memory_allocated() / 2**30, training_memory(_shape(recipe), recipe.train, 1)
        planned = sum(parts[part] for part in ("target", "activations", "loss")) / 2**30
        planned += 2 * parts["gradients"] / 2**30 + parts["batch"] / 2**31  # weights and gradients; one batch
        yield Row(f"memory, {tokens} tokens", f"<= {1.1 * planned:.1f} GiB", f"{gib:.1f} GiB", gib <= 1.1 * planned)
        if tokens == 8192:
            yield from _profile(take)


def _config_of_public_targets() -> None:
    """A cache of the hub that holds what the tests have of public targets, and no network."""
    import huggingface_hub.constants

    from tests.public_targets import fill_hub

    folder = tempfile.mkdtemp(prefix="drafthead-hub-")
    huggingface_hub.constants.HF_HUB_CACHE, huggingface_hub.constants.HF_HUB_OFFLINE = folder, True
    fill_hub(Path(folder))


def _shape(recipe: Recipe) -> DraftShape:
    return draft_shape(recipe.head, recipe_spec(recipe), recipe.target.aux_layer_ids)


def _step_of(recipe: Recipe, tokens: int, documents: int, device: torch.device) -> tuple[Callable[[], None], float]:
    """Forward and backward, every row in the loss; and its matrix products' operations."""
    drafter, shape, dtype = drafter_of(recipe.head), _shape(recipe), torch.bfloat16
    length, H, V, D = tokens // documents, shape.hidden_size, shape.vocab_size, shape.head.draft_vocab_size
    mask = torch.ones(length, dtype=torch.bool)
    scored = drafter.loss_rows(mask).repeat(1, documents)
    K = len(scored)
    torch.manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    index = torch.arange(tokens)
    batch = PackedBatch(
        layout=tail_layout([length] * documents, [0] * documents), input_ids=torch.randint(V, (tokens,)),
        positions=index % length, aux=random(tokens, shape.num_aux_layers * H), loss_mask=mask.repeat(documents),
        scored=scored, of_row=index, last_hidden=random(tokens, H), argmax=torch.randint(V, (tokens,)),
        lse=torch.full((tokens,), 15.0),
    ).prepared(K, device.type).to(device, dtype)  # fmt: skip
    target = FrozenTarget(
        random(V, H), torch.ones(H, device=device), random(D, H), shape.rms_norm_eps, torch.arange(D, device=device)
    )
    draft = drafter.MODULE(shape).to(device, dtype)
    module = LossModule(draft, recipe.train.objective)
    scale = torch.full((K,), 1 / tokens, device=device)
    heads, groups = (n * shape.head.head_dim for n in (shape.head.num_attention_heads, shape.head.num_key_value_heads))
    # Weights of the block that every TTT step multiplies; embeddings' half of q, k, v once. 6: forward and backward.
    block = H * (2 * heads + 2 * groups) + 3 * H * shape.head.intermediate_size
    once = shape.num_aux_layers * H * H + H * (heads + 2 * groups)
    rows = int(scored.sum())
    flops = 6.0 * (tokens * (K * block + once) + rows * D * H) - 2.0 * tokens * shape.num_aux_layers * H * H
    flops += 2.0 * tokens * D * H + 3.5 * K * 4 * heads * tokens * (length + 1) / 2

    def take() -> None:
        module.zero_grad()
        module(batch, target, scale).loss.backward()

    return take, flops


def _timed(take: Callable[[], None], device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    synchronize()
    start = time.perf_counter()
    take()
    synchronize()
    return time.perf_counter() - start


def _profile(take: Callable[[], None]) -> Iterator[Row]:
    """Milliseconds of a step by region, and the ten longest kernels of the rest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        take()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    rest: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        region = next(name for name, (p, _) in REGIONS.items() if re.search(p, event.key, re.IGNORECASE))
        spent[region] += event.self_device_time_total / 1000
        if region == "other":
            rest[event.key[:60]] += event.self_device_time_total / 1000
    for region, (_, measured) in REGIONS.items():
        ms, most = spent[region], 1.25 * measured
        yield Row(f"of it {region}", f"<= {most:.1f} ms (an H100 and a quarter)", f"{ms:.1f} ms", ms <= most)
    for kernel, ms in sorted(rest.items(), key=lambda item: -item[1])[:10]:
        yield Row(f"  {kernel}", "", f"{ms:.2f} ms", True)


def training(on_cpu: bool) -> Iterator[Row]:
    """DeepSpeed ZeRO 1 through accelerate, on states that no target computed."""
    from tests.scripts import run_ok
    from tests.training import launching
    from tests.training.synthetic import small_recipe, synthetic_store

    settings = () if on_cpu else ("train.precision=bf16", "train.deterministic=true")
    with tempfile.TemporaryDirectory(prefix="drafthead-gpu-") as folder:
        data = small_recipe(Path(folder) / "whole", *settings)
        for split, count, seed in (("train", 60, 0), ("validation", 6, 1)):
            synthetic_store(data, split, count, seed)
        launching.run(data, *settings)
        losses = launching.losses(data.run_dir)

        def apart(other: Recipe) -> float:
            pairs = zip(launching.losses(other.run_dir), losses, strict=True)
            return max(abs(a - b) / b for a, b in pairs)

        seen = f"{losses[0]:.3f} -> {losses[-1]:.3f}"
        yield Row("learns", "last loss < half of the first", seen, losses[-1] < losses[0] / 2)

        killed = small_recipe(Path(folder) / "killed", *settings)
        shutil.copytree(data.directory("data"), killed.directory("data"))
        left = _kill(launching.command(killed, *settings), killed)
        launching.run(killed, *settings)
        same = _weights(killed) == _weights(data)
        seen = "equal" if same else f"differ, losses by {apart(killed):.1e}"
        yield Row("killed, resumed", "weights equal to the last bit", f"killed with {left}; {seen}", same)

        ranks = small_recipe(Path(folder) / "ranks", *settings)
        shutil.copytree(data.directory(), ranks.directory())
        *_, last_checkpoint, _ = launching.checkpoints(ranks.run_dir)
        launching.forget_after(ranks.run_dir, int(last_checkpoint.name.removeprefix("step_")))
        _claim_ranks(launching.checkpoints(ranks.run_dir)[-1], 2)
        launching.run(ranks, *settings)
        yield Row("resumed after 2 ranks", "losses within 1 %", f"{apart(ranks):.2e}", apart(ranks) < 0.01)
        yield from _recipe(Path(folder) / "recipe", on_cpu)
    backend = "gloo" if on_cpu else "nccl"
    code = (
        "import os, torch, torch.distributed as d; os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0');"
        f"d.init_process_group('{backend}', rank=0, world_size=1, store=d.HashStore());"
        f"t = torch.ones(4, device='{'cpu' if on_cpu else 'cuda'}'); d.all_reduce(t); print(t.sum().item())"
    )
    seen = run_ok("-c", code).split()[-1]
    yield Row(f"{backend} on one rank", "4.0", seen, seen == "4.0")


def _recipe(folder: Path, on_cpu: bool) -> Iterator[Row]:
    """gpt-oss-120b's recipe through accelerate's launcher, on random weights and states: pace and memory of a rank.

    And with what no recipe of this size has: Muon, ZeRO 2 and 3, documents longer than a batch; one epoch of each.
    """
    from tests.public_targets import TARGETS
    from tests.scripts import accelerate, run_ok
    from tests.training.launching import SCRIPT, entries
    from tests.training.synthetic import write_store

    name, documents, length = ("tiny", 32, 128) if on_cpu else ("gpt-oss-120b", 64, 2048)
    path = REPO_ROOT / "configs" / f"{name}.yaml"
    overrides = [f"output_dir={folder}", "train.epochs=3", "train.batches_per_step=1", "train.tokens_per_batch=16384"]
    if on_cpu:
        overrides[-1] = "train.tokens_per_batch=1024"
    else:
        target = shutil.copytree(TARGETS / "openai--gpt-oss-120b", folder / "target")
        for file in Path(load_recipe().target_path).glob("tokenizer*"):
            shutil.copy(file, target)
        overrides.append(f"target.path={target}")
        config = read_json(target / "config.json")
        rows, H = torch.randn(config["vocab_size"], config["hidden_size"]).bfloat16(), config["hidden_size"]
        weights = {"model.embed_tokens.weight": rows, "lm_head.weight": rows * H**-0.5}
        save_file({**weights, "model.norm.weight": torch.ones(H).bfloat16()}, target / "model.safetensors")
    recipe = load_recipe(path, overrides)
    noise = torch.randn(2 * length, recipe_spec(recipe).hidden_size).bfloat16()
    for split, count in (("train", documents), ("validation", 2)):
        write_store(recipe, split, [_random_states(recipe, f"{split}-{i}", noise) for i in range(count)])
    overrides.append(f"data={recipe.name}")
    variants = {
        "": (),
        "Muon": ("train.optimizer=muon", "train.epochs=1"),
        "ZeRO 2": ("train.zero_stage=2", "train.epochs=1"),
        "ZeRO 3": ("train.zero_stage=3", "train.epochs=1"),
        "documents of 1 1/3 batches": (f"train.tokens_per_batch={3 * length // 4}", "train.epochs=1"),
    }
    for number, (what, changes) in enumerate(variants.items()):
        run = [*overrides, f"name=v{number}", *changes]
        run_ok(*accelerate(), SCRIPT, str(path), *run)
        recipe = load_recipe(path, run)
        metrics, tokens = entries(recipe.run_dir), recipe.train.tokens_per_batch
        # Of single steps, whose batches are all full: a rate since the start has the first step's compilation in it.
        pace = tokens / statistics.median(entry["step_seconds"] for entry in metrics)
        least = 0.8 * 16384 / MEASURED_MS[16384] * 1000  # which has no optimiser and no reading
        compared = not on_cpu and not changes
        yield Row(
            f"trainer, {tokens} tokens a step{what and ', '}{what}", f">= {least:,.0f} tokens/s" if compared else "",
            f"{pace:,.0f} tokens/s", not compared or pace >= least,
        )  # fmt: skip
        planned = sum(training_memory(_shape(recipe), recipe.train, 1, longest=length).values()) / 2**30
        gib = metrics[-1]["memory_gib"]
        expected = "" if on_cpu else f"<= {1.1 * planned:.1f} GiB"
        yield Row("its memory", expected, f"{gib:.1f} GiB", on_cpu or gib <= 1.1 * planned)


def _random_states(recipe: Recipe, name: str, noise: torch.Tensor) -> StateSequence:
    """One conversation half as long as the noise (2T, H) that its states are taken from; an eighth of it a prompt."""
    vocabulary, length = recipe_spec(recipe).vocab_size, len(noise) // 2
    mask = torch.arange(length) >= length // 8

    def random(rows: int) -> torch.Tensor:
        begin = int(torch.randint(length, ()))
        return noise[begin : begin + rows]

    rows = length - first_teacher_row(mask)
    return StateSequence(
        id=name, input_ids=torch.randint(vocabulary, (length,)).int(), loss_mask=mask.to(torch.uint8),
        aux={layer: random(length) for layer in recipe.target.aux_layer_ids}, last_hidden=random(rows),
        argmax=torch.randint(vocabulary, (rows,)).int(), lse=torch.full((rows,), 15.0),
    )  # fmt: skip


def _kill(command: list[str], recipe: Recipe) -> str:
    """Kill a training run, its launcher and all, once it has a checkpoint; returns the newest one's name."""
    from tests.scripts import environment
    from tests.training import launching

    process = subprocess.Popen([sys.executable, *command], cwd=REPO_ROOT, env=environment(), start_new_session=True)
    while process.poll() is None and not launching.checkpoints(recipe.run_dir):
        time.sleep(0.01)
    assert process.poll() is None, "training ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return launching.checkpoints(recipe.run_dir)[-1].name


def _claim_ranks(checkpoint: Path, ranks: int) -> None:
    """Let a checkpoint say that so many ranks wrote it: it is loaded through DeepSpeed's universal form then."""
    write_json(checkpoint / "state.json", {**read_json(checkpoint / "state.json"), "world_size": ranks})
    names = list(read_json(checkpoint / "manifest.json")["files"])
    write_json(checkpoint / "manifest.json", {"files": file_entries(checkpoint, names)})


def _weights(recipe: Recipe) -> str:
    newest = sorted((recipe.run_dir / "checkpoints").glob("step_*"))[-1]
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


PARTS = {"kernels": kernels, "step": step, "training": training}


def main(part: str, on_cpu: bool, results: Path) -> None:
    """Run a part, print its table, write it beside the logs; exit code 1 if a check failed."""
    from rich.console import Console
    from rich.table import Table

    name = "CPU, a trial" if on_cpu else torch.cuda.get_device_name()
    table, rows = Table("check", "expected", "seen", "verdict", title=f"{part}: {name}"), []
    for row in PARTS[part](on_cpu):
        print(f"{row.check}: {row.seen}", flush=True)
        rows.append(row)
        table.add_row(row.check, row.expected, row.seen, "passed" if row.passed else "FAILED")
    Console(width=140).print(table)
    results.mkdir(parents=True, exist_ok=True)
    written = {"device": name, "rows": [row._asdict() for row in rows]}
    (results / f"{part}.json").write_text(json.dumps(written, indent=1))
    sys.exit(0 if all(row.passed for row in rows) else 1)
