"""Prompts: what the target is asked, one Parquet file per split.

A prompt is a conversation that ends where the target has to speak, or the token ids of one that somebody
rendered already. Its id is a hash of its content, so the same prompt has the same id in every source, split
and run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from drafthead.files import atomic_path
from drafthead.provenance import ArtefactError, digest

SPLITS = ("train", "validation", "heldout")
KIND = "prompts"
_ROLES = ("system", "developer", "user", "assistant", "tool")


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
        answer: what the data says next, an assistant's message, with its "thinking" where it has one. It is no part of
            the id, and only kept where a recipe trains on it (responses.regenerate false).
    """

    id: str
    source: str
    category: str
    messages: tuple[dict[str, Any], ...]
    prompt_ids: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    document: str = ""
    answer: dict[str, Any] | None = None


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


def pretokenised_prompt(row: dict[str, Any], where: str) -> Prompt:
    """Check a row whose `prompt_ids` are token ids already.

    Raises:
        ValueError: they are not a list of at least one whole number from 0 to 2^31 - 1.
    """
    ids = row["prompt_ids"]
    if not are_token_ids(ids):
        shown = f"{ids!r:.60}"
        raise ValueError(f"{where}: `prompt_ids` must be a non-empty list of token ids (0 or more), found {shown}")
    kept = tuple(ids)
    return Prompt(
        prompt_id((), kept), str(row.get("source", "local")), str(row.get("category", "all")), (), prompt_ids=kept
    )


def are_token_ids(ids: Any) -> bool:
    """Whether a value is a list of at least one number that a token's id can be: 32 bits, not negative."""
    return isinstance(ids, list) and bool(ids) and all(type(i) is int and 0 <= i < 2**31 for i in ids)


def parse_prompt(row: dict[str, Any], where: str) -> Prompt:
    """Check one row of a JSONL source.

    Args:
        row: needs `messages` or `prompt_ids`; may have `source` and `category`. An assistant's message at the end is
            the prompt's answer.
        where: file and line, for the error message.

    Raises:
        ValueError: a message has no text, an unknown role or text that is not valid Unicode, the
            conversation does not end with the user, or the token ids are none.
    """
    if "prompt_ids" in row:
        return pretokenised_prompt(row, where)
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
    answer = messages[-1] if messages[-1]["role"] == "assistant" else None
    asked = messages[:-1] if answer else messages
    if not asked or asked[-1]["role"] != "user":
        ends = f"ends with {asked[-1]['role']!r}" if asked else "is an answer to nothing"
        raise ValueError(f"{where}: the conversation {ends}, where 'user' or an answer to it is wanted")
    kept = tuple({"role": m["role"], "content": m["content"]} for m in asked)
    source, category = str(row.get("source", "local")), str(row.get("category", "all"))
    if answer:
        answer = {"role": "assistant", "content": answer["content"], **thought_of(answer)}
    return Prompt(prompt_id(kept), source, category, kept, answer=answer)


def thought_of(row: Mapping[str, Any]) -> dict[str, str]:
    """An assistant's thought under one name, whatever the data calls it; empty where there is none."""
    found = next((row[key] for key in ("thinking", "reasoning_content", "reasoning") if row.get(key)), None)
    return {"thinking": found} if isinstance(found, str) else {}


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write one split as Parquet; a column that no prompt of the split uses is left out."""
    optional = [name for name in _OPTIONAL if any(getattr(p, name) for p in prompts)]
    rows = [{name: _COLUMNS[name][1](getattr(p, name)) for name in (*_ALWAYS, *optional)} for p in prompts]
    schema = pa.schema([(name, _COLUMNS[name][0]) for name in (*_ALWAYS, *optional)])
    with atomic_path(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)


def read_prompts(directory: Path, split: str) -> list[Prompt]:
    """Read one split of a prompts artefact.

    Raises:
        ArtefactError: the split's file is missing or not readable.
    """
    path = directory / f"{split}.parquet"
    if not path.exists():
        raise ArtefactError(f"{path} does not exist; run: python data_gen/prompts.py RECIPE")
    return [_from_row(row) for row in pq.read_table(path).to_pylist()]


def ids_of(directory: Path, splits: Sequence[str]) -> set[str]:
    """Ids of the prompts of some splits."""
    return {prompt.id for split in splits for prompt in read_prompts(directory, split)}


def _from_row(row: dict[str, Any]) -> Prompt:
    ids, tools, answer = row.get("prompt_ids"), row.get("tools"), row.get("answer")
    return Prompt(
        row["id"],
        row["source"],
        row["category"],
        tuple(json.loads(row["messages"])),
        prompt_ids=tuple(ids) if ids else None,
        tools=tuple(json.loads(tools)) if tools else None,
        document=row.get("document") or "",
        answer=json.loads(answer) if answer else None,
    )


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


_ALWAYS = ("id", "source", "category", "messages")
_OPTIONAL = ("prompt_ids", "tools", "document", "answer")
_COLUMNS: dict[str, tuple[pa.DataType, Callable[[Any], Any]]] = {  # name -> type, how a value is stored
    "id": (pa.string(), str),
    "source": (pa.string(), str),
    "category": (pa.string(), str),
    "messages": (pa.string(), _json),
    "prompt_ids": (pa.list_(pa.int32()), lambda ids: ids),
    "tools": (pa.string(), _json),
    "document": (pa.string(), str),
    "answer": (pa.string(), _json),
}
