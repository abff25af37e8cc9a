"""Recipe: prompts of 1,000 to 16,000 tokens for the embedded target, and a sibling of it that reads them.

    python -m tools.tiny_long DIR              # DIR/target, DIR/short.jsonl, DIR/mix.jsonl; half an hour on one core
    python -m tools.tiny_long DIR --steps 0    # a target that is only stretched; ten seconds

The sibling has the embedded target's weights and a rotary embedding stretched to 32,768 positions (YaRN, factor 32
instead of 2), and is then trained towards what it was without code, behind long code and without
(`tools/tiny/lengthen.py`). Only stretched, its responses get worse with the length, but stay responses. A prompt is
code of its split, but not the question's own, then a shipped question; its category is its length. Every length has
the same questions. Held-out prompts are the same in both files, 32 of each length. To train on, `short.jsonl` has the
shipped prompts; `mix.jsonl` 200 fewer, and 40 long ones of each length instead.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.tiny.corpus import read_library
from tools.tiny.files import read_prompts, write_prompts
from tools.tiny.lengthen import lengthen
from tools.tiny.samples import build_samples

EMBEDDED = Path(__file__).resolve().parents[1] / "data_gen" / "tiny"
POSITIONS = 32768
LENGTHS = (1, 2, 4, 8, 16)  # thousands (1,024) of tokens
PER_LENGTH = {"train": 40, "heldout": 32}
_FENCE = "```python\n"
STEPS = 240
_BESIDES = 40  # tokens of the chat template

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training at such lengths, {STEPS} unless given")
    options = parser.parse_args()
    if options.steps < 0:
        parser.error(f"--steps is {options.steps}, but must be at least 0: 0 only stretches the target")
    directory, unfinished = options.directory, options.directory / "unfinished-target"
    if (directory / "target").exists():
        parser.error(f"{directory / 'target'} is there already: name another directory, or delete it")
    write_target(unfinished)
    tokenizer = AutoTokenizer.from_pretrained(unfinished)

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    rows = read_prompts(EMBEDDED / "prompts.jsonl")
    written = long_rows(rows, tokens)
    short = [{key: row[key] for key in ("category", "split", "messages")} for row in rows if row["split"] == "train"]
    fewer = random.Random(1).sample(short, len(short) - PER_LENGTH["train"] * len(LENGTHS))
    write_prompts(short + [row for row in written if row["split"] == "heldout"], directory / "short.jsonl")
    write_prompts(fewer + written, directory / "mix.jsonl")
    if options.steps:
        train_target(unfinished, options.steps, tokens)
    unfinished.rename(directory / "target")


def write_target(directory: Path) -> None:
    """The embedded target with a rotary embedding for `POSITIONS`."""
    shutil.copytree(EMBEDDED / "target", directory, dirs_exist_ok=True)
    for name, key in (("config", "max_position_embeddings"), ("tokenizer_config", "model_max_length")):
        path = directory / f"{name}.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config[key] = POSITIONS
        if name == "config":
            rope = config["rope_parameters"]
            rope["factor"] = POSITIONS / rope["original_max_position_embeddings"]
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def train_target(directory: Path, steps: int, tokens: Callable[[str], int]) -> None:
    """Train the stretched target in place on questions of the training split behind code of it."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="blocks")
        for path in (directory, EMBEDDED / "target")
    )
    for model in (student, teacher):
        model.set_experts_implementation("grouped_mm")
    samples = [s for s in build_samples(*read_library(), 2, 0) if s.split == "train"]
    sized, choose = _sized_code([sample.prompt for sample in samples[::9]], tokens), random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    lengthen(
        student.train(), teacher.eval(), tokenizer, samples,
        lambda size, questions: _code(choose, sized, size, questions, tokens), steps,
    )  # fmt: skip
    student.to(torch.bfloat16).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    (directory / "training.json").unlink()  # of the embedded target


def long_rows(rows: list[Row], tokens: Callable[[str], int]) -> list[Row]:
    """Prompts of every length and split, in a fixed random order.

    Args:
        rows: shipped prompts.
        tokens: how many a text has.
    """
    choose, written = random.Random(0), []
    for split, number in PER_LENGTH.items():
        split_rows = [row for row in rows if row["split"] == split]
        questions = [row["messages"][0]["content"] for row in split_rows]
        sized = _sized_code(questions, tokens)
        asked = choose.sample(questions, number)
        for length in LENGTHS:
            for question in asked:
                code = _code(choose, sized, 1024 * length, [question], tokens)
                messages = [{"role": "user", "content": code + question}]
                written.append({"category": f"{length:02}k", "split": split, "messages": messages})
    return written


def _sized_code(questions: list[str], tokens: Callable[[str], int]) -> list[tuple[str, int]]:
    """The code of the questions that have some, and its tokens."""
    code = [text.split(_FENCE)[1].split("```")[0] for text in questions if _FENCE in text]
    return [(piece, tokens(piece) + 1) for piece in code]


def _code(
    choose: random.Random,
    sized: list[tuple[str, int]],
    length: int,
    questions: list[str],
    tokens: Callable[[str], int],
) -> str:
    """A block of code, without that of `questions`, with which the longest of them is a prompt of `length` tokens."""
    left, pieces = length - _BESIDES - max(tokens(question) for question in questions), []
    for piece, size in choose.choices(sized, k=length // 8):
        if size <= left and not any(piece in question for question in questions):
            pieces.append(piece)
            left -= size
    return f"{_FENCE}{chr(10).join(pieces)}```\n\n"


if __name__ == "__main__":
    main()
