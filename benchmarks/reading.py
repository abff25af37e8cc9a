"""How fast training reads micro batches from stored states, against what a GPU asks for: 44,000 tokens/s.

    python benchmarks/reading.py [--format fp8 bf16] [--folder DIR] [--gib 4] [--threads 1]

An H100 at 50 % MFU takes 16,384 tokens in 0.37 s, of gpt-oss-120b 1.0 GB/s of states in bf16. Documents of 300 prompt
and 1,460 response tokens of its width (three aux layers of 2,880) are written in shards below --folder, packed into
micro batches of 16,384 tokens and read as training does, by one thread ahead: first from disk, then from the page
cache. `plain` reads the same files and does nothing with the bytes. One thread of torch is what a launcher of several
ranks gives each.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from drafthead.config import REPO_ROOT, load_recipe
from drafthead.data.packing import pack, plan_epoch, split_windows
from drafthead.data.shard import StateSequence, shard_path, write_shard
from drafthead.data.store import StateStore
from drafthead.drafters.registry import drafter_of
from drafthead.training.feed import Prefetch

H, LAYERS, NUM_LAYERS = 2880, (2, 18, 33), 36
PROMPT, RESPONSE, PER_SHARD, BUDGET = 300, 1460, 64, 16_384
LENGTH = PROMPT + RESPONSE
IN_BF16 = 2 * H * (len(LAYERS) + RESPONSE / LENGTH)  # bytes of states per token


def write_store(folder: Path, number_format: str, gib: float) -> None:
    """Shards of the same states again and again, about so many GiB as bf16."""
    states, ids = torch.randn(LENGTH, H).to(torch.bfloat16), torch.arange(LENGTH)
    for index in range(max(1, round(gib * 2**30 / (IN_BF16 * LENGTH * PER_SHARD)))):
        sequences = [
            StateSequence(
                id=f"{index}-{i}", input_ids=ids, loss_mask=(ids >= PROMPT).byte(), aux=dict.fromkeys(LAYERS, states),
                last_hidden=states[PROMPT - 1 :], argmax=ids[PROMPT - 1 :], lse=torch.zeros(RESPONSE + 1),
            )
            for i in range(PER_SHARD)
        ]  # fmt: skip
        write_shard(shard_path(folder, index), sequences, NUM_LAYERS, number_format)
    os.sync()


def read(folder: Path) -> tuple[int, float]:
    """Tokens of one epoch, and the seconds that reading its micro batches took."""
    store, drafter = StateStore(folder), drafter_of(load_recipe(REPO_ROOT / "configs" / "gpt-oss-120b.yaml").head)
    windows = [w for i in range(len(store)) for w in split_windows(i, store.tokens(i)[1], BUDGET, drafter)]
    plan, pin = plan_epoch(windows, BUDGET, 0, 0), torch.cuda.is_available()
    device = torch.device("cuda" if pin else "cpu")
    K, kind = drafter.num_positions, device.type
    prefetch = Prefetch(plan, lambda batch: pack(store, batch, drafter, pin=pin).prepared(K, kind), device)
    start = time.perf_counter()
    for index in range(len(plan)):
        prefetch.take(index)
        prefetch.start(index + 1)
    return sum(w.num_tokens for w in windows), time.perf_counter() - start


def read_plainly(folder: Path) -> float:
    """Bytes per second of reading every file."""
    buffer, total, start = bytearray(1 << 24), 0, time.perf_counter()
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):  # type: ignore[attr-defined]
                total += count
    return total / (time.perf_counter() - start)


def drop_pages(folder: Path) -> None:
    """Take the files out of the page cache; only while nobody maps them."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", default=["fp8", "bf16"])
    parser.add_argument("--folder", type=Path, help="where the store is made for the time being")
    parser.add_argument("--gib", type=float, default=4.0, help="of states as bf16")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for number_format in options.format:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            write_store(folder, number_format, options.gib)
            for place in ("disk", "memory"):
                if place == "disk":
                    drop_pages(folder)
                tokens, seconds = read(folder)
                if place == "disk":
                    drop_pages(folder)
                plain, rate = read_plainly(folder), tokens / seconds
                print(
                    f"{number_format} from {place}: {rate:,.0f} tokens/s, {rate * IN_BF16 / 1e9:.2f} GB/s in bf16; "
                    f"plain reading of the files {plain / 1e9:.2f} GB/s"
                )


if __name__ == "__main__":
    main()
