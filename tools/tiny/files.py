"""Write and read the shipped files: prompts, model directory and training record.

Gives up: partial updates; each file is written whole.
Alternative: the Hugging Face Hub; the embedded default must work without a network.
"""

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from drafthead.artifacts import read_json

RECORD = "training.json"  # beside the weights


def write_prompts(rows: list[dict[str, object]], path: Path) -> None:
    """Write one JSON object per line, in the given order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read the prompts file."""
    if not path.is_file():
        raise FileNotFoundError(f"no prompts at {path}: run tools/tiny_target.py --prompts-only")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save weights in bf16 with tokenizer, chat template and generation settings."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        # As in gpt-oss: a tool call ends the turn as well.
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|call|>")],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def read_record(directory: Path) -> dict[str, object]:
    """Read how the target was trained."""
    path = directory / RECORD
    if not path.is_file():
        raise FileNotFoundError(f"no training record at {path}: run tools/tiny_target.py first")
    return read_json(path)
