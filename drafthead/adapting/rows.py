"""The prompts of a cycle: captured traffic to train on, a replay of older text, and the newest that is held out.

By time, within each workload: its newest share is held out, so that every workload of the retained traffic is judged,
also those that the newest requests lack. A prompt that the served head or any head before it was trained on is never
held out. The prompts stage drops what is left of overlaps, as for any source (13 words in a row, compared in the
decoded prompts).
"""

import json
import random
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from drafthead.adapting.capture import REST, Record
from drafthead.adapting.drift import by_workload
from drafthead.artifacts import MANIFEST, read_manifest
from drafthead.config import Recipe
from drafthead.data.prompts import prompt_id, read_trained_on
from drafthead.data.responses import read_parts
from drafthead.files import atomic_path
from drafthead.target.tokenizer import load_tokenizer, special_tokens

_HELD_OUT, _MOST_HELD_OUT = 0.2, 48  # of each workload: share, and prompts


class TooFewError(ValueError):
    """Too few requests were captured to train a head and to compare it."""


def write_rows(path: Path, recipe: Recipe, captured: Sequence[Record], alarmed: float, served: Path) -> None:
    """Write the file that the prompts stage reads.

    Args:
        path: path of the file to write.
        recipe: recipe whose responses the first head was trained on; they may be gone.
        captured: all captured records with tokens.
        alarmed: time of the alarm; records from then on are trained on, older ones are replayed.
        served: directory of the head in service.

    Raises:
        TooFewError: nothing is left to train on, or to hold out.
    """
    known = read_trained_on(served, read_manifest(served)) or set()
    heldout = _held_out(captured, known)
    chosen = {id(r) for r in heldout}
    rest = [r for r in captured if id(r) not in chosen]
    new, old = [r for r in rest if r["at"] >= alarmed], [r for r in rest if r["at"] < alarmed]
    pool, share = [*old, *_first_training(recipe)], recipe.adapt.replay_share
    replayed = random.Random(0).sample(pool, min(len(pool), round(len(new) * share / (1 - share))))
    if not heldout or not new:
        raise TooFewError(
            f"of {len(captured)} captured requests {len(new)} are to train on and {len(heldout)} to hold out: both are "
            "needed; raise adapt.min_tokens or adapt.rate"
        )
    tokenizer, (special, _) = load_tokenizer(recipe), special_tokens(recipe)
    rows = [("train", r) for r in [*new, *replayed]] + [("heldout", r) for r in heldout]
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number, (split, record) in enumerate(rows):
            ids = list(record["prompt_ids"])
            text = _comparable(tokenizer, special, ids, number)
            row = {"prompt_ids": ids, "category": record["workload"], "split": split, "text_input": text}
            if split == "train":  # those held out are answered again
                row["response_ids"] = list(record["response_ids"])
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _comparable(tokenizer: Any, special: set[int], ids: Sequence[int], number: int) -> str:
    """The text of a prompt, to look for overlaps in: a word of its own in place of every run of control tokens.

    Without, the same few words of the chat template would make a run with whatever follows them.
    """
    pieces = (tokenizer.decode(list(part)) for control, part in groupby(ids, special.__contains__) if not control)
    return f" row{number} ".join(pieces)


def _held_out(captured: Sequence[Record], known: set[str]) -> list[Record]:
    """The newest of each workload that no head has seen, each prompt once; workloads of one or two requests are one."""
    held_out, groups = list[Record](), by_workload(captured)
    small = [name for name, rows in groups.items() if not round(_HELD_OUT * len(rows))]
    pooled = [record for name in small for record in groups.pop(name)]
    groups[REST] = groups.get(REST, []) + pooled
    for rows in groups.values():
        remaining, ids = min(_MOST_HELD_OUT, round(_HELD_OUT * len(rows))), set(known)
        for record in sorted(rows, key=lambda r: -r["at"]):
            if remaining and (key := prompt_id((), record["prompt_ids"])) not in ids:
                ids.add(key)
                held_out.append(record)
                remaining -= 1
    return held_out


def _first_training(recipe: Recipe) -> list[Record]:
    """What the first head was trained on, like captured requests; nothing where its responses are gone."""
    directory = recipe.responses_dir("train")
    parts = read_parts(directory).values() if (directory / MANIFEST).exists() else ()
    responses = chain.from_iterable(parts)
    return [{"prompt_ids": r.prompt_ids, "response_ids": r.response_ids, "workload": r.category} for r in responses]
