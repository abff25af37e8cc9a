"""Recipe: prompts of 1,000 to 16,000 tokens for the embedded target, and a sibling of it that reads them.

    python -m tools.tiny_long DIR        # DIR/target, DIR/short.jsonl, DIR/mix.jsonl; ten seconds

The sibling has the embedded target's weights and a rotary embedding stretched to 32,768 positions (YaRN, factor 32
instead of 2). It was never trained at such lengths: its responses get worse with them, but stay responses. A prompt is
code of other prompts of its split, then a shipped question; its category is its length. Every length has the same
questions. Held-out prompts are the same in both files, 16 of each length. To train on, `short.jsonl` has the shipped
prompts; `mix.jsonl` 200 fewer, and 40 long ones of each length instead.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tools.tiny.files import read_prompts, write_prompts

EMBEDDED = Path(__file__).resolve().parents[1] / "data_gen" / "tiny"
POSITIONS = 32768
LENGTHS = (1, 2, 4, 8, 16)  # thousands (1,024) of tokens
PER_LENGTH = {"train": 40, "heldout": 16}
_FENCE = "```python\n"
_BESIDES = 40  # tokens of the chat template

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    write_target(directory / "target")
    tokenizer = AutoTokenizer.from_pretrained(directory / "target")
    rows = read_prompts(EMBEDDED / "prompts.jsonl")
    written = long_rows(rows, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    short = [{key: row[key] for key in ("category", "split", "messages")} for row in rows if row["split"] == "train"]
    fewer = random.Random(1).sample(short, len(short) - PER_LENGTH["train"] * len(LENGTHS))
    write_prompts(short + [row for row in written if row["split"] == "heldout"], directory / "short.jsonl")
    write_prompts(fewer + written, directory / "mix.jsonl")


def write_target(directory: Path) -> None:
    """The embedded target with a rotary embedding for `POSITIONS`."""
    shutil.copytree(EMBEDDED / "target", directory, dirs_exist_ok=True)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config["rope_parameters"]
    config["max_position_embeddings"] = POSITIONS
    rope["factor"] = POSITIONS / rope["original_max_position_embeddings"]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def long_rows(rows: list[Row], tokens: Callable[[str], int]) -> list[Row]:
    """Prompts of every length and split, in a fixed random order.

    Args:
        rows: shipped prompts.
        tokens: how many a text has.
    """
    choose, written = random.Random(0), []
    for split, wanted in PER_LENGTH.items():
        own = [row for row in rows if row["split"] == split]
        questions = [row["messages"][0]["content"] for row in own]
        code = [text.split(_FENCE)[1].split("```")[0] for text in questions if _FENCE in text]
        sized = [(piece, tokens(piece) + 1) for piece in code]
        asked = choose.sample(questions, wanted)
        for length in LENGTHS:
            for question in asked:
                left = 1024 * length - tokens(question) - _BESIDES
                pieces = []
                for piece, size in choose.choices(sized, k=1024 * length // 8):
                    if size <= left:
                        pieces.append(piece)
                        left -= size
                content = f"{_FENCE}{chr(10).join(pieces)}```\n\n{question}"
                messages = [{"role": "user", "content": content}]
                written.append({"category": f"{length:02}k", "split": split, "messages": messages})
    return written


if __name__ == "__main__":
    main()
