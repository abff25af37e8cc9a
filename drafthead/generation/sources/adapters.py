"""One pure function per schema: a row of the data set as published -> a conversation.

An adapter names the columns it reads; `need` turns a missing one into an error that lists those that are there.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from drafthead.data.prompts import are_token_ids
from drafthead.generation.sources.conversation import Conversation, RowError, ask, parse_json, parse_messages
from drafthead.provenance import digest

Row = Mapping[str, Any]
Adapter = Callable[[Row], Conversation]


class SchemaError(ValueError):
    """A row lacks a column that its source must have: another data set, or another version of it."""


def need(row: Row, *names: str) -> Any:
    """The value of the first of `names` that the row has.

    Raises:
        SchemaError: it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise SchemaError(f"no column {' or '.join(names)}; found: {', '.join(map(str, row)) or 'none'}")


def sharegpt(row: Row) -> Conversation:
    """ShareGPT: conversations of from/value. Long chats are published in pieces ID_0, ID_17, ... of one document."""
    messages = parse_messages(need(row, "conversations"))
    identity = row.get("id")
    return Conversation(messages, re.sub(r"_\d+$", "", str(identity)) if identity else _document(messages))


def mlperf(row: Row) -> Conversation:
    """MLPerf gpt-oss: token ids with Harmony applied (`input_tokens`, `tok_input` in older files).

    Every row is its own document; the accuracy set repeats its questions, and equal ids are one document.
    """
    ids = token_ids(need(row, "input_tokens", "tok_input"))
    return Conversation(
        (), digest(list(ids))[:16], str(row.get("dataset") or "") or None, None, ids, str(row.get("text_input") or "")
    )


def swe_bench(row: Row) -> Conversation:
    """SWE-bench: the issue's text. The document is the repository: its issues quote each other and its code."""
    return Conversation(ask(need(row, "problem_statement")), str(need(row, "repo")))


def turns(row: Row) -> Conversation:
    """MT-Bench and Spec-Bench: the first of `turns`; later ones ask about an answer that is not there yet."""
    asked = need(row, "turns")
    if isinstance(asked, str) or not len(asked):
        raise RowError("no turns")
    return Conversation(ask(asked[0]), f"question {need(row, 'question_id')}", row.get("category"))


def human_eval(row: Row) -> Conversation:
    """HumanEval: a function to complete; some copies say so in words."""
    return Conversation(ask(f"Complete this Python function.\n\n{need(row, 'prompt')}"), str(need(row, "task_id")))


def gsm8k(row: Row) -> Conversation:
    """GSM8K: the question; its published answer is not used."""
    return _own_document(ask(need(row, "question")))


def instruct_coder(row: Row) -> Conversation:
    """InstructCoder: code to edit and what to do with it, in the wording of vLLM's benchmark."""
    code, task = row.get("input") or "", need(row, "instruction")
    wish = f"{task} Just output the code, do not include any explanation."
    return _own_document(ask(f"{code}\n\n{wish}" if code.strip() else wish))


def writing_prompts(row: Row) -> Conversation:
    """WritingPrompts: one row per story; equal prompts are one document. "[ WP ]" is the forum's tag."""
    prompt = re.sub(r"^\s*\[\s*\w+\s*\]\s*", "", need(row, "prompt"))
    return _own_document(ask(f"Write a short story for this prompt.\n\n{prompt}"))


def chat(row: Row) -> Conversation:
    """UltraChat, Nemotron, Perfect-Blend, Hermes JSON mode: a list of messages under one of the usual names."""
    messages = parse_messages(need(row, "messages", "conversations", "conversation"))
    tools = parse_json(row["tools"], "tools") if row.get("tools") else []
    tools = tuple(tools) if isinstance(tools, list) else (tools,)
    key = next((str(row[name]) for name in ("prompt_id", "uuid", "id") if row.get(name)), None)
    category = row.get("category") or row.get("source")
    return Conversation(messages, key or _document(messages), category, tools or None)


def magpie(row: Row) -> Conversation:
    """Magpie: conversations of from/value, with the task each belongs to."""
    messages = parse_messages(need(row, "conversations"))
    return Conversation(messages, str(row.get("uuid") or _document(messages)), row.get("task_category"))


def burst_gpt(row: Row) -> Conversation:
    """BurstGPT: a trace of lengths, read by column name. The text is filler of that many words: throughput only.

    Raises:
        RowError: the request failed (a length of 0).
    """
    count, answered = int(need(row, "Request tokens")), int(need(row, "Response tokens"))
    if count < 1 or answered < 1:
        raise RowError("a failed request")
    drawn = np.random.default_rng(int(digest({k: str(v) for k, v in row.items()})[:12], 16)).integers(0, 26, (count, 3))
    words = " ".join("".join(chr(97 + letter) for letter in word) for word in drawn.tolist())
    return _own_document(ask(words))


def anything(row: Row) -> Conversation:
    """A local file of your own: the usual column names, most specific first.

    Messages, `prompt_ids` (or `input_ids`), `turns`, an issue, instruction with input, or a prompt.
    """
    category = str(row["category"]) if row.get("category") else None
    document = next((str(row[name]) for name in ("document", "repo", "id", "question_id") if row.get(name)), "")
    if any(row.get(name) is not None for name in ("messages", "conversations", "conversation")):
        found = chat(row)
    elif any(row.get(name) is not None for name in ("prompt_ids", "input_ids", "input_tokens", "tok_input")):
        ids = token_ids(need(row, "prompt_ids", "input_ids", "input_tokens", "tok_input"))
        found = Conversation((), digest(list(ids))[:16], None, None, ids, str(row.get("text_input") or ""))
    elif row.get("turns") is not None:
        found = _own_document(ask(row["turns"][0] if len(row["turns"]) else None))
    elif row.get("instruction") is not None:
        found = _own_document(ask("\n\n".join(filter(None, [row["instruction"], row.get("input")]))))
    else:
        found = _own_document(ask(need(row, "prompt", "question", "problem_statement", "text"), row.get("system")))
    return Conversation(found.messages, document or found.document, category, found.tools, found.prompt_ids, found.text)


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids from a list or an array.

    Raises:
        RowError: there are none, or one is not a whole number from 0 to 2^31 - 1.
    """
    ids = value.tolist() if hasattr(value, "tolist") else parse_json(value, "token ids")
    if not are_token_ids(ids):
        raise RowError("no list of token ids")
    return tuple(ids)


def _document(messages: tuple[dict[str, Any], ...]) -> str:
    """The key of a conversation without a name: what its first user says, so that branches of it stay together."""
    first = next(m["content"] for m in messages if m["role"] == "user")
    return digest(" ".join(first.casefold().split()))[:16]


def _own_document(messages: tuple[dict[str, Any], ...]) -> Conversation:
    return Conversation(messages, _document(messages))
