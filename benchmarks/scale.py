"""How time and memory of the stages' own bookkeeping grow with the data: what breaks first on the way up.

    python benchmarks/scale.py [--sizes 10000 100000] [--only prompts responses store epoch verify results]

Each measurement is a process of its own, on data made for it: nothing here needs a target that runs. Prompts:
conversations of about 120 words, read, compared with the held-out ones and drawn. Responses: answers of 40 tokens in
parts of 10,000, all links to one, listed as the shards of a harvest. Store: as many shards, all links to one small one,
opened as training opens them. Epoch: documents of 400 tokens, cut, packed and ordered. Verify: as many MiB of shards,
checked as `harvest.py --verify` checks them. Results: as many measurements of 48 requests, read and summarised. CPU
seconds count what the process itself computed, so that other work on the machine changes them less than wall time;
memory is the peak above what the process held before. An exponent is that of the growth between two neighbouring sizes:
1.0 is linear.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

WORDS = 120  # of a conversation
ANSWER = 40  # tokens
DOCUMENT = 400  # tokens
PART = 10_000  # answers
_LINKS = 50_000


def prompts(count: int, folder: Path) -> Callable[[], object]:
    """From a file of conversations to the three splits, the guard against overlaps included."""
    from drafthead.config import load_recipe
    from drafthead.generation.prompts import make_prompts

    chooser, path = random.Random(0), folder / "conversations.jsonl"
    words = ["".join(chooser.choices("abcdefghijklmnopqrstuvwxyz", k=chooser.randint(2, 9))) for _ in range(20_000)]
    with path.open("w") as file:
        for _ in range(count):
            message = {"role": "user", "content": " ".join(chooser.choices(words, k=WORDS))}
            file.write(json.dumps({"messages": [message]}) + "\n")
    overrides = [f"output_dir={folder}", f"prompts.path={path}", "prompts.max_train=null", "prompts.max_heldout=null"]
    recipe = load_recipe(overrides=overrides)
    return lambda: make_prompts(recipe)


def responses(count: int, folder: Path) -> Callable[[], object]:
    """Answers listed as the shards of a harvest."""
    from drafthead import artifacts
    from drafthead.config import load_recipe
    from drafthead.data.responses import KIND, Response, part_path, write_part
    from drafthead.generation.shards import list_jobs

    recipe = load_recipe(overrides=[f"output_dir={folder}"])
    directory = recipe.responses_dir("train")
    artifacts.begin(directory, KIND, {})
    one = Response("", "chat", list(range(ANSWER)), list(range(ANSWER)), [], "text " * ANSWER, "stop", 1.0, "low", 0)
    write_part(part_path(directory, 0), [replace(one, id=f"{i:064x}") for i in range(min(count, PART))])
    _link(part_path(directory, 0), [part_path(directory, part) for part in range(1, count // PART)])
    artifacts.finish(directory, {})
    return lambda: sum(job.num_tokens for job in list_jobs(recipe, "train"))


def store(count: int, folder: Path) -> Callable[[], object]:
    """So many shards opened at once, and a token read of each."""
    import torch

    from drafthead.data.shard import StateSequence, shard_path, write_shard
    from drafthead.data.store import StateStore

    ids, mask, rows = torch.arange(8).int(), torch.ones(8, dtype=torch.uint8), torch.zeros(8, 16).bfloat16()
    sequence = StateSequence("p", ids, mask, {2: rows}, rows, ids, torch.zeros(8))
    write_shard(shard_path(folder, 0), [sequence], 8)
    _link(shard_path(folder, 0), [shard_path(folder, index) for index in range(1, count)])

    def opened() -> None:
        states = StateStore(folder)
        for index in range(len(states)):
            states.tokens(index)

    return opened


def epoch(count: int, folder: Path) -> Callable[[], object]:
    """Documents cut into windows, packed into batches and ordered."""
    import torch

    from drafthead.config import load_recipe
    from drafthead.data.packing import cut, plan_epoch
    from drafthead.drafters.registry import drafter_of

    drafter, mask = drafter_of(load_recipe().head), torch.ones(DOCUMENT, dtype=torch.bool)
    mask[:50] = False
    return lambda: plan_epoch([w for i in range(count) for w in cut(i, mask, 4096, drafter)], 4096, 0, 0)


def verify(count: int, folder: Path) -> Callable[[], object]:
    """So many MiB of shards of 16 MiB, read from memory where they fit."""
    import torch

    from drafthead import artifacts
    from drafthead.data.shard import StateSequence, shard_path, write_shard
    from drafthead.data.store import KIND, verify_store

    artifacts.begin(folder / "states", KIND, {})
    ids, mask, rows = torch.arange(1024).int(), torch.ones(1024, dtype=torch.uint8), torch.rand(1024, 2048).bfloat16()
    sequence = StateSequence("p", ids, mask, {2: rows, 4: rows, 6: rows}, rows, ids, torch.zeros(1024))
    write_shard(shard_path(folder / "states", 0), [sequence], 8)
    _link(shard_path(folder / "states", 0), [shard_path(folder / "states", i) for i in range(1, count // 16)])
    artifacts.finish(folder / "states", {})

    def verified() -> None:
        assert not verify_store(folder / "states")

    return verified


def results(count: int, folder: Path) -> Callable[[], object]:
    """So many measurements of a server, half of them of the baseline."""
    from drafthead.config import load_recipe
    from drafthead.evaluation.results.levels import read_serving, summarise_serving
    from tests.evaluation.rows import write_results

    recipe = load_recipe(overrides=[f"output_dir={folder}"])
    write_results(recipe, head_speed=dict.fromkeys(range(1, count // 2 + 1), 1.2))
    return lambda: summarise_serving(read_serving(recipe.results_dir / "serving"))


def _link(first: Path, others: Sequence[Path]) -> None:
    for index, path in enumerate(others, start=1):  # a file can have 65,000 names
        if index % _LINKS == 0:
            first = Path(shutil.copy(first, path))
        else:
            os.link(first, path)


SUBJECTS = {
    "prompts": prompts, "responses": responses, "store": store, "epoch": epoch, "verify": verify, "results": results,
}  # fmt: skip


def measure(name: str, count: int) -> None:
    """Print what one size takes, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        work = SUBJECTS[name](count, Path(folder))
        held = _resident()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        wall, cpu = time.perf_counter(), time.process_time()
        kept = work()
        seconds, wall = time.process_time() - cpu, time.perf_counter() - wall
        peak = int(_status("VmHWM")) * 1024
        print(json.dumps({"cpu_s": seconds, "wall_s": wall, "memory_mib": (peak - held) / 2**20, "kept": bool(kept)}))


def _resident() -> int:
    return int(_status("VmRSS")) * 1024


def _status(key: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[10_000, 30_000, 100_000])
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], int(args.measure[1]))
        return
    print("| what | size | CPU seconds | exponent | memory MiB | exponent |\n|---|---|---|---|---|---|")
    for name in args.only:
        before = None
        for size in args.sizes:
            command = [sys.executable, __file__, "--measure", name, str(size)]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
            result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if result.returncode:
                print(f"| {name} | {size:,} | failed: {result.stderr.strip().splitlines()[-1]} | | | |", flush=True)
                break
            found = json.loads(result.stdout.splitlines()[-1])
            exponents = ["", ""]
            if before:
                exponents = [
                    f"{math.log(max(found[key], 1e-3) / max(before[key], 1e-3)) / math.log(size / before['size']):.2f}"
                    for key in ("cpu_s", "memory_mib")
                ]
            cells = f"{found['cpu_s']:.1f} | {exponents[0]} | {found['memory_mib']:,.0f} | {exponents[1]}"
            print(f"| {name} | {size:,} | {cells} |", flush=True)
            before = found | {"size": size}


if __name__ == "__main__":
    main()
