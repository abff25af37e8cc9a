"""How long a mix of 100,000 chats of 300 words takes to read, deduplicate and compare with its held-out prompts.

    python benchmarks/prompt_mix.py

The chats are random words in ShareGPT's schema, 5 % of them held out, beside 3,000 held-out questions of 100 words.
"""

import json
import random
import resource
import tempfile
import time
from pathlib import Path

from drafthead.config.recipe import PromptsConfig
from drafthead.generation.prompts import locate_sources, make_mix

CHATS, QUESTIONS = 100_000, 3_000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = PromptsConfig.model_validate({"sources": write_sources(Path(folder))})
        wall, cpu = time.perf_counter(), time.process_time()
        mix = make_mix(settings, locate_sources(settings))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux: KiB
    print(f"{len(mix.train):,} training and {len(mix.heldout):,} held-out prompts drawn")
    print(f"{wall:.0f} s, {cpu:.0f} s of one core, {memory:.1f} GiB at most")


def write_sources(folder: Path) -> list[dict]:
    rng = random.Random(0)
    words = [f"w{i}" for i in range(30_000)]

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=count))

    with (folder / "chats.jsonl").open("w") as file:
        for i in range(CHATS):
            turns = [("human", 150), ("gpt", 100), ("human", 50)]
            chat = [{"from": role, "value": text(count)} for role, count in turns]
            file.write(json.dumps({"id": f"c{i}_0", "conversations": chat}) + "\n")
    with (folder / "questions.jsonl").open("w") as file:
        for i in range(QUESTIONS):
            file.write(json.dumps({"question_id": i, "category": "all", "turns": [text(100)]}) + "\n")
    return [
        {"name": "sharegpt", "path": str(folder / "chats.jsonl"), "train": 90_000, "heldout": 800},
        {"name": "mt-bench", "path": str(folder / "questions.jsonl"), "heldout": 80},
    ]


if __name__ == "__main__":
    main()
