"""One conversation, whatever its data set calls roles and texts: the one parser of every prompt file.

Messages come out as {"role", "content"} in the roles of chat templates. Refused, with a reason for the caller to count
or to raise: empty turns, unknown roles, images, and text that is not valid Unicode.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]

_SPELLINGS = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"),
    "tool": ("tool", "function", "observation", "ipython"),
}
ROLES = {spelling: role for role, spellings in _SPELLINGS.items() for spelling in spellings}
_THOUGHT_KEYS = ("thinking", "reasoning_content", "reasoning")
_BEFORE_RESPONSE = ("user", "tool")  # the target responds to one of these


class RowError(ValueError):
    """A row is not a conversation; the message gives the reason without the row's own text."""


@dataclass(frozen=True)
class Conversation:
    """What an adapter makes of one row.

    Attributes:
        messages: normalised by `parse_messages`; empty when there are only `prompt_ids`.
        document: rows with the same key are cut from the same text and never lie in two splits.
        category: within the source; None: the source's own.
        tools: definitions for the chat template.
        prompt_ids: token ids to be read as they are.
        response_ids: the answer to `prompt_ids`, likewise.
        text: the text of `prompt_ids`, where the row has it; only to look for overlaps.
        split: "train" or "heldout", where the row declares it.
        source: data set that the row names.

    Raises:
        RowError: a text is not valid Unicode, or a value is not JSON.
    """

    messages: tuple[Message, ...]
    document: str
    category: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    response_ids: tuple[int, ...] | None = None
    text: str = ""
    split: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        try:
            json.dumps({**vars(self), "prompt_ids": None, "response_ids": None}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RowError("text that is not valid Unicode (a lone surrogate)") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise RowError("tools or tool_calls are not valid JSON") from error


def parse_messages(rows: Any) -> tuple[Message, ...]:
    """Messages in chat templates' roles, without empty system messages and what an assistant says before any user.

    Raises:
        RowError: there is no user, or a message has an unknown role or no text.
    """
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise RowError("messages must be a non-empty list")
    parsed = [_parse_message(row) for row in rows]
    kept = [m for m in parsed if m["role"] not in ("system", "developer") or m["content"]]
    # Public chats are often cut in pieces: a piece may begin with the end of a response.
    first = next((i for i, m in enumerate(kept) if m["role"] in _BEFORE_RESPONSE), len(kept))
    kept = [m for i, m in enumerate(kept) if i >= first or m["role"] != "assistant"]
    if not any(m["role"] == "user" for m in kept):
        raise RowError("no user message")
    for message in kept:
        if not message["content"] and not message.get("tool_calls"):
            raise RowError(f"the text of a message of role {message['role']} is empty")
    return tuple(kept)


def question(text: Any, system: Any = None) -> tuple[Message, ...]:
    """A single question as messages; raises RowError when it is empty."""
    rows = [{"role": "system", "content": system}] if system else []
    return parse_messages([*rows, {"role": "user", "content": text}])


def cut(
    messages: Sequence[Message], turns: Literal["first", "last", "all"]
) -> list[tuple[tuple[Message, ...], Message | None]]:
    """The prompts of a conversation, each with the response that follows it in the data, if any.

    Of  u1 a1 u2  "first" gives [(u1, a1)], "last" [(u1 a1 u2, None)], "all" both.
    """
    following = [*messages[1:], None]
    ends = [
        i
        for i, (message, after) in enumerate(zip(messages, following, strict=True))
        if message["role"] in _BEFORE_RESPONSE and (after is None or after["role"] not in _BEFORE_RESPONSE)
    ]
    chosen = {"first": ends[:1], "last": ends[-1:], "all": ends}[turns]
    # A server is not sent the thoughts of earlier turns again.
    sent = [{key: value for key, value in message.items() if key != "thinking"} for message in messages]
    after = [m if m and m["role"] == "assistant" else None for m in following]
    return [(tuple(sent[: end + 1]), after[end]) for end in chosen]


def _parse_message(row: Any) -> Message:
    if not isinstance(row, Mapping):
        raise RowError("a message is not an object")
    named = next((row[key] for key in ("role", "from") if row.get(key) is not None), None)
    role = ROLES.get(str(named).strip().lower())
    if role is None:
        raise RowError(f"unknown role {str(named)[:20]!r}; known roles: {', '.join(ROLES)}")
    content = next((row[key] for key in ("content", "value") if row.get(key) is not None), None)
    message: Message = {"role": role, "content": _text(content)}
    if role == "tool":
        message |= {key: str(row[key]) for key in ("name", "tool_call_id") if row.get(key)}
    if role == "assistant":
        thought = next((row[key] for key in _THOUGHT_KEYS if row.get(key)), None)
        message |= {"thinking": thought} if isinstance(thought, str) else {}
        message |= {"tool_calls": parse_json(row["tool_calls"])} if row.get("tool_calls") else {}
    return message


def _text(content: Any) -> str:
    """The text of a message, "" for white space; content parts are joined when all of them are text."""
    if content is None or isinstance(content, str):
        return content if content and content.strip() else ""
    if isinstance(content, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return _text("".join(texts))
    raise RowError("a message that is not text")


def parse_json(value: Any) -> Any:
    """A value that some data sets store as JSON text; raises RowError when a text is not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise RowError("a text that should hold JSON does not") from error


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids from a list or its JSON text.

    Raises:
        RowError: there are none, or one is not a whole number from 0 to 2^31 - 1.
    """
    ids = parse_json(value)
    if not (isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < 2**31 for i in ids)):
        raise RowError("token ids must be a non-empty list of whole numbers from 0 to 2^31 - 1")
    return tuple(ids)
