"""How fast training's reader makes micro batches of stored states, against a GPU's pace: 1 GB/s.

    python benchmarks/reading.py [--format fp8 bf16] [--folder DIR] [--gib 4] [--threads 1]

Documents of 300 prompt and 1,460 response tokens at gpt-oss-120b's width (three aux layers of 2,880) are written in
shards below --folder, packed into micro batches of 16,384 tokens as training does, and read twice: from disk, the pages
dropped from the page cache, and from memory. GB/s are those of the batches in the types that the GPU is sent, beside
what they hold as bf16; `plain` reads the same files and does nothing with the bytes.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from drafthead.config import REPO_ROOT, load_recipe
from drafthead.data.packing import cut, pack, plan_epoch
from drafthead.data.shard import StateSequence, shard_path, write_shard
from drafthead.data.store import StateStore
from drafthead.drafters.registry import drafter_of
from drafthead.training.feed import Prefetch

H, LAYERS, NUM_LAYERS = 2880, (2, 18, 33), 36
PROMPT, RESPONSE, PER_SHARD, BUDGET = 300, 1460, 64, 16_384
BF16_TOKEN = 2 * H * (len(LAYERS) + RESPONSE / (PROMPT + RESPONSE))


def write_store(folder: Path, number_format: str, gib: float) -> StateStore:
    """Shards of random states, about so many GiB as bf16."""
    length, generator = PROMPT + RESPONSE, torch.Generator().manual_seed(0)
    states = torch.randn(length, H, generator=generator).to(torch.bfloat16)
    shards = max(1, round(gib * 2**30 / (BF16_TOKEN * length * PER_SHARD)))
    for index in range(shards):
        sequences = [
            StateSequence(
                id=f"{index}-{i}", input_ids=torch.arange(length), loss_mask=(torch.arange(length) >= PROMPT).byte(),
                aux=dict.fromkeys(LAYERS, states), last_hidden=states[PROMPT - 1 :],
                argmax=torch.arange(PROMPT - 1, length), lse=torch.zeros(length - PROMPT + 1), first_teacher_row=PROMPT - 1,
            )
            for i in range(PER_SHARD)
        ]  # fmt: skip
        write_shard(shard_path(folder, index), sequences, NUM_LAYERS, number_format)
    os.sync()
    return StateStore(folder)


def batches(store: StateStore) -> Iterator[tuple[int, int]]:
    """Tokens and bytes of one micro batch after another, read as training does."""
    drafter = drafter_of(load_recipe(REPO_ROOT / "configs" / "gpt-oss-120b.yaml").head)
    windows = [w for i in range(len(store)) for w in cut(i, store.tokens(i)[1], BUDGET, drafter)]
    plan = plan_epoch(windows, BUDGET, 0, 0)
    prefetch = Prefetch(plan, lambda w: pack(store, w, drafter), torch.cuda.is_available())
    for index, batch in enumerate(plan):
        made = prefetch.take(index)
        prefetch.start(index + 1)
        yield sum(w.num_tokens for w in batch), sum(t.nbytes for t in made._tensors().values())


def drop(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain(folder: Path) -> int:
    """Read every file; bytes."""
    buffer, total = bytearray(1 << 24), 0
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def timed(work: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", default=["fp8", "bf16"])
    parser.add_argument("--folder", type=Path, help="where the store is made for the time being")
    parser.add_argument("--gib", type=float, default=4.0, help="of states as bf16")
    parser.add_argument("--threads", type=int, default=1, help="of torch; a launcher of several ranks gives each one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for number_format in options.format:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            store = write_store(folder, number_format, options.gib)
            for place in ("disk", "memory"):
                for _ in range(2 if place == "memory" else 1):
                    if place == "disk":
                        drop(folder)
                    seconds, sizes = timed(lambda: list(batches(store)))
                tokens, sent = (sum(column) for column in zip(*sizes, strict=True))
                if place == "disk":
                    drop(folder)
                raw_seconds, raw = timed(lambda: plain(folder))
                print(
                    f"{number_format} from {place}: {tokens / seconds:,.0f} tokens/s, sent {sent / seconds / 1e9:.2f} GB/s, "
                    f"as bf16 {tokens * BF16_TOKEN / seconds / 1e9:.2f} GB/s; plain reading {raw / raw_seconds / 1e9:.2f} GB/s"
                )


if __name__ == "__main__":
    main()
