"""Prompts: what the target is asked, one Parquet file per split.

A prompt is a conversation that ends where the target has to speak. Its id is a hash of its content,
so the same prompt has the same id in every source, split and run.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from drafthead.provenance import ArtefactError, atomic_path, digest

SPLITS = ("train", "validation", "heldout")
KIND = "prompts"
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """One conversation for the target to continue.

    Attributes:
        id: first 16 hex digits of the SHA-256 of the canonical JSON of `messages`.
        source: data set it came from.
        category: workload it belongs to; results are reported per category.
        messages: chat messages, each {"role": ..., "content": ...}; the last one is the user's.
    """

    id: str
    source: str
    category: str
    messages: tuple[dict[str, str], ...]


def prompt_id(messages: Sequence[dict[str, str]]) -> str:
    """The content hash that identifies a prompt."""
    return digest(list(messages))[:16]


def parse_prompt(row: dict[str, Any], where: str) -> Prompt:
    """Check one row of a JSONL source.

    Args:
        row: needs `messages`; may have `source` and `category`.
        where: file and line, for the error message.

    Raises:
        ValueError: a message has no text, an unknown role or text that is not valid Unicode, or the
            conversation does not end with the user.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: `messages` must be a non-empty list, found {messages!r}")
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise ValueError(f"{where}: unknown role {role!r}; known roles: {', '.join(_ROLES)}")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"{where}: a {role} message has no text (content={content!r})")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: a {role} message is not valid Unicode: {error}") from error
    if messages[-1]["role"] != "user":
        raise ValueError(f"{where}: the conversation ends with {messages[-1]['role']!r}, not with 'user'")
    kept = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    return Prompt(prompt_id(kept), str(row.get("source", "local")), str(row.get("category", "all")), kept)


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write one split as Parquet."""
    rows = [{**asdict(p), "messages": json.dumps(p.messages, ensure_ascii=False)} for p in prompts]
    with atomic_path(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), temporary)


def read_prompts(directory: Path, split: str) -> list[Prompt]:
    """Read one split of a prompts artefact.

    Raises:
        ArtefactError: the split's file is missing or not readable.
    """
    path = directory / f"{split}.parquet"
    if not path.exists():
        raise ArtefactError(f"{path} does not exist; run: python data_gen/prompts.py RECIPE")
    rows = pq.read_table(path).to_pylist()
    return [Prompt(r["id"], r["source"], r["category"], tuple(json.loads(r["messages"]))) for r in rows]


_SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "source", "category", "messages")])
