"""The prompts artifact: one Parquet file per split.

A prompt is a conversation up to the message that the target responds to, or the token ids of one that was rendered
before. Its id is a hash of its content, so the same prompt has the same id in every source, split and run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from drafthead.artifacts import ArtifactError, digest
from drafthead.files import atomic_path

SPLITS = ("train", "validation", "heldout")
KIND = "prompts"


@dataclass(frozen=True)
class Prompt:
    """One conversation for the target to continue.

    Attributes:
        id: first 16 hex digits of the SHA-256 of the canonical JSON of its content; see `prompt_id`.
        source: data set it came from.
        category: workload it belongs to; results are reported per category.
        messages: chat messages, each {"role": ..., "content": ...}, an assistant's with "tool_calls" where it made
            any; the last one is the user's or a tool's. Empty when there are only `prompt_ids`.
        prompt_ids: token ids to be read as they are, instead of `messages`; they fit one tokenizer only.
        tools: definitions handed to the chat template.
        document: what it was cut from; a document is never in two splits. Empty: the prompt is its own document.
        response: the assistant's message that follows in the data, with its "thinking" where it has one. Not part of
            the id, and only stored where a recipe trains on it (responses.regenerate false).
        response_ids: the same for `prompt_ids`, as token ids.
    """

    id: str
    source: str
    category: str
    messages: tuple[dict[str, Any], ...]
    prompt_ids: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    document: str = ""
    response: dict[str, Any] | None = None
    response_ids: tuple[int, ...] | None = None


def prompt_id(
    messages: Sequence[dict[str, Any]],
    prompt_ids: Sequence[int] | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """The content hash that identifies a prompt: of the messages, with the tools where there are any, or of the ids."""
    if prompt_ids is not None:
        return digest({"prompt_ids": list(prompt_ids)})[:16]
    if tools:
        return digest({"messages": list(messages), "tools": list(tools)})[:16]
    return digest(list(messages))[:16]


_REQUIRED = [pa.field(name, pa.string()) for name in ("id", "source", "category", "messages")]
_OPTIONAL = [
    pa.field("prompt_ids", pa.list_(pa.int32())),
    pa.field("tools", pa.string()),
    pa.field("document", pa.string()),
    pa.field("answer", pa.string()),
    pa.field("response_ids", pa.list_(pa.int32())),
]
_ATTRIBUTES = {"answer": "response"}  # which the first artifacts called so
_AS_JSON = ("messages", "tools", "answer")
_BATCH = 10_000  # rows, of which another copy is in memory while they are written


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write one split as Parquet; an optional column that no prompt of the split uses is left out."""
    used = [field for field in _OPTIONAL if any(getattr(p, _ATTRIBUTES.get(field.name, field.name)) for p in prompts)]
    schema = pa.schema([*_REQUIRED, *used])
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for start in range(0, max(len(prompts), 1), _BATCH):
            rows = [_to_row(prompt) for prompt in prompts[start : start + _BATCH]]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def read_prompts(directory: Path, split: str) -> list[Prompt]:
    """Read one split of a prompts artifact.

    Raises:
        ArtifactError: the split's file is missing or not readable.
    """
    path = directory / f"{split}.parquet"
    if not path.exists():
        raise ArtifactError(f"{path} does not exist; run: python data_gen/prompts.py RECIPE")
    return [_from_row(row) for row in pq.read_table(path).to_pylist()]


def ids_of(directory: Path, splits: Sequence[str]) -> set[str]:
    """Ids of the prompts of some splits."""
    return {prompt.id for split in splits for prompt in read_prompts(directory, split)}


def _to_row(prompt: Prompt) -> dict[str, Any]:
    row = dict(vars(prompt), answer=prompt.response)
    return row | {name: json.dumps(row[name], ensure_ascii=False) for name in _AS_JSON if row[name] is not None}


def _from_row(row: dict[str, Any]) -> Prompt:
    row |= {name: json.loads(row[name]) for name in _AS_JSON if row.get(name)}
    return Prompt(
        id=row["id"],
        source=row["source"],
        category=row["category"],
        messages=tuple(row["messages"]),
        prompt_ids=tuple(row.get("prompt_ids") or ()) or None,
        tools=tuple(row.get("tools") or ()) or None,
        document=row.get("document") or "",
        response=row.get("answer"),
        response_ids=tuple(row.get("response_ids") or ()) or None,
    )
