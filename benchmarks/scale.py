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
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from stepbench.memory import PeakMemory

from drafthead import artifacts
from drafthead.config import REPO_ROOT, load_recipe
from drafthead.data import responses as answers
from drafthead.data import store as states
from drafthead.data.packing import plan_epoch, split_windows
from drafthead.data.shard import StateSequence, shard_path, write_shard
from drafthead.drafters.registry import drafter_of
from drafthead.generation.prompts import make_prompts
from drafthead.generation.shards import list_jobs
from drafthead.processes import ends_with_parent

WORDS = 120  # of a conversation
ANSWER = 40  # tokens
DOCUMENT = 400  # tokens
PART = 10_000  # answers
_LINKS = 50_000


def prompts(count: int, folder: Path) -> Callable[[], object]:
    """From a file of conversations to the three splits, the guard against overlaps included."""
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
    recipe = load_recipe(overrides=[f"output_dir={folder}"])
    directory = recipe.responses_dir("train")
    artifacts.begin(directory, answers.KIND, {})
    ids, text = list(range(ANSWER)), "text " * ANSWER
    one = answers.Response("", "chat", ids, ids, [], text, "stop", 1.0, "low", 0)
    first, *further_parts = (answers.part_path(directory, part) for part in range(max(1, count // PART)))
    answers.write_part(first, [replace(one, id=f"{i:064x}") for i in range(min(count, PART))])
    _link(first, further_parts)
    artifacts.finish(directory, {})
    return lambda: sum(job.num_tokens for job in list_jobs(recipe, "train"))


def store(count: int, folder: Path) -> Callable[[], object]:
    """So many shards opened at once, and a token read of each."""
    _write_shards(folder, count, tokens=8, hidden=16, layers=(2,))

    def opened() -> None:
        opened_store = states.StateStore(folder)
        for index in range(len(opened_store)):
            opened_store.tokens(index)

    return opened


def epoch(count: int, folder: Path) -> Callable[[], object]:
    """Documents cut into windows, packed into batches and ordered."""
    drafter, mask = drafter_of(load_recipe().head), torch.ones(DOCUMENT, dtype=torch.bool)
    mask[:50] = False
    return lambda: plan_epoch([w for i in range(count) for w in split_windows(i, mask, 4096, drafter)], 4096, 0, 0)


def verify(count: int, folder: Path) -> Callable[[], object]:
    """So many MiB of shards of 16 MiB, read from memory where they fit."""
    artifacts.begin(folder / "states", states.KIND, {})
    _write_shards(folder / "states", count // 16, tokens=1024, hidden=2048, layers=(2, 4, 6))
    artifacts.finish(folder / "states", {})

    def verified() -> None:
        assert not states.verify_store(folder / "states")

    return verified


def results(count: int, folder: Path) -> Callable[[], object]:
    """So many measurements of a server, half of them of the baseline."""
    from drafthead.evaluation.results.levels import read_serving, summarise_serving
    from tests.evaluation.rows import write_results

    recipe = load_recipe(overrides=[f"output_dir={folder}"])
    write_results(recipe, head_speed=dict.fromkeys(range(1, count // 2 + 1), 1.2))
    return lambda: summarise_serving(read_serving(recipe.results_dir / "serving"))


def _write_shards(folder: Path, count: int, tokens: int, hidden: int, layers: Sequence[int]) -> None:
    ids, mask = torch.arange(tokens).int(), torch.ones(tokens, dtype=torch.uint8)
    rows = torch.rand(tokens, hidden).bfloat16()
    first, *further_shards = (shard_path(folder, index) for index in range(max(1, count)))
    sequence = StateSequence("p", ids, mask, dict.fromkeys(layers, rows), rows, ids, torch.zeros(tokens))
    write_shard(first, [sequence], 8)
    _link(first, further_shards)


def _link(first: Path, copies: Sequence[Path]) -> None:
    for index, path in enumerate(copies, start=1):  # a file can have 65,000 names
        if index % _LINKS == 0:
            first = Path(shutil.copy(first, path))
        else:
            os.link(first, path)


SUBJECTS = {
    "prompts": prompts, "responses": responses, "store": store, "epoch": epoch, "verify": verify, "results": results,
}  # fmt: skip


def measure(name: str, count: int) -> tuple[float, float]:
    """CPU seconds and MiB of one size."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        work = SUBJECTS[name](count, Path(folder))
        with PeakMemory("cpu") as memory:
            start = time.process_time()
            work()
            seconds = time.process_time() - start
        return seconds, memory.needed / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[10_000, 30_000, 100_000])
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    args = parser.parse_args()
    sys.path.insert(0, str(REPO_ROOT))  # made-up rows of the tests
    print("| what | size | CPU seconds | exponent | memory MiB | exponent |\n|---|---|---|---|---|---|")
    for name in args.only:
        before: tuple[float, ...] = ()
        for size in args.sizes:
            try:
                with ProcessPoolExecutor(1, get_context("spawn"), ends_with_parent()) as process:
                    seconds, memory = process.submit(measure, name, size).result()
            except Exception as error:
                print(f"| {name} | {size:,} | failed: {type(error).__name__}: {error} | | | |", flush=True)
                break
            costs = (size, max(seconds, 1e-3), max(memory, 1e-3))
            growth = [math.log(now / then) for now, then in zip(costs, before, strict=False)]
            exponents = [f"{grown / growth[0]:.2f}" for grown in growth[1:]] or ["", ""]
            cells = f"{seconds:.1f} | {exponents[0]} | {memory:,.0f} | {exponents[1]}"
            print(f"| {name} | {size:,} | {cells} |", flush=True)
            before = costs


if __name__ == "__main__":
    main()
