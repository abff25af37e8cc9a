"""One conversation, whatever its data set calls its roles.

Messages come out as {"role", "content"} in the roles of chat templates. What cannot be told apart from damage is
refused with a reason, which the caller counts: empty turns, images, text that is not valid Unicode.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drafthead.data.prompts import thought_of

Turns = Literal["first", "last", "all"]
Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_ROLE_KEYS, _TEXT_KEYS = ("role", "from"), ("content", "value")
_TO_ANSWER = ("user", "tool")  # the target speaks after one of these


class RowError(ValueError):
    """A row is not a conversation; the message says why, without the row's own text."""


@dataclass(frozen=True)
class Conversation:
    """What an adapter makes of one row.

    Attributes:
        messages: normalised by `parse_messages`; empty when there are only `prompt_ids`.
        document: rows with the same key are cut from the same text and never lie in two splits.
        category: within the source; None: the source's own.
        tools: definitions for the chat template.
        prompt_ids: token ids to be read as they are.
        text: what `prompt_ids` say, where the row tells; only to look for overlaps.
    """

    messages: tuple[Message, ...]
    document: str
    category: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    text: str = ""


def parse_messages(rows: Any) -> tuple[Message, ...]:
    """Messages in chat templates' roles; an empty system message is dropped, and so is an answer to nothing.

    Raises:
        RowError: there is no user, or a message has an unknown role, no text, or text that is not valid Unicode.
    """
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise RowError("no list of messages")
    parsed = [_parse_message(row) for row in rows]
    kept = [m for m in parsed if m["role"] not in ("system", "developer") or m["content"]]
    # Public chats are often cut in pieces: a piece may begin with the end of an answer.
    first = next((i for i, m in enumerate(kept) if m["role"] in _TO_ANSWER), len(kept))
    kept = [m for i, m in enumerate(kept) if i >= first or m["role"] != "assistant"]
    if not any(m["role"] == "user" for m in kept):
        raise RowError("no user message")
    empty = next((m["role"] for m in kept if not m["content"] and not m.get("tool_calls")), None)
    if empty:
        raise RowError(f"an empty {empty} message")
    return tuple(kept)


def ask(text: Any, system: Any = None) -> tuple[Message, ...]:
    """A single question as messages.

    Raises:
        RowError: it is empty or not valid Unicode.
    """
    rows = [{"role": "system", "content": system}] if system else []
    return parse_messages([*rows, {"role": "user", "content": text}])


def cut(messages: Sequence[Message], turns: Turns) -> list[tuple[Message, ...]]:
    """The prompts of a conversation: up to its first, its last, or each message that asks for an answer.

    Of  u1 a1 u2 a2  "first" gives [u1], "last" [u1 a1 u2], "all" both.
    """
    ends = [
        i
        for i, message in enumerate(messages)
        if message["role"] in _TO_ANSWER and (i + 1 == len(messages) or messages[i + 1]["role"] not in _TO_ANSWER)
    ]
    chosen = {"first": ends[:1], "last": ends[-1:], "all": ends}[turns]
    return [tuple(_unthought(message) for message in messages[: end + 1]) for end in chosen]


def answer_to(messages: Sequence[Message], cut_off: Sequence[Message]) -> Message | None:
    """What a conversation says after the prompt that was cut off its beginning, if that is an assistant's message."""
    following = messages[len(cut_off)] if len(cut_off) < len(messages) else None
    return following if following and following["role"] == "assistant" else None


def _unthought(message: Message) -> Message:
    """Thoughts of earlier turns are not sent to a server again."""
    return {key: value for key, value in message.items() if key != "thinking"}


def _parse_message(row: Any) -> Message:
    if not isinstance(row, Mapping):
        raise RowError("a message is not an object")
    named = next((row[key] for key in _ROLE_KEYS if row.get(key) is not None), None)
    role = ROLES.get(str(named).strip().lower())
    if role is None:
        raise RowError(f"unknown role {str(named)[:20]!r}")
    message: Message = {"role": role, "content": _text(next((row[key] for key in _TEXT_KEYS if key in row), None))}
    for key in ("name", "tool_call_id"):
        if role == "tool" and row.get(key):
            message[key] = _valid(str(row[key]))
    if role == "assistant":
        message |= {key: _valid(text) for key, text in thought_of(row).items()}
    if role == "assistant" and row.get("tool_calls"):
        message["tool_calls"] = parse_json(row["tool_calls"], "tool_calls")
    return message


def _text(content: Any) -> str:
    """The text of a message; content parts of several kinds are joined when all of them are text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _valid(content) if content.strip() else ""
    if isinstance(content, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return _text("".join(texts))
    raise RowError("a message that is not text")


def check_unicode(conversation: Conversation) -> None:
    """See that what stands beside the messages can be written, too.

    Raises:
        RowError: it holds half of a surrogate pair.
    """
    for text in (conversation.document, conversation.category, conversation.text):
        _valid(str(text))


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError("text that is not valid Unicode (a lone surrogate)") from error
    return text


def parse_json(value: Any, name: str) -> Any:
    """A value that some data sets store as JSON text; checked to be JSON and valid Unicode.

    Raises:
        RowError: it is neither.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else value
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, TypeError) as error:  # UnicodeEncodeError is a ValueError
        raise RowError(f"{name} is not valid JSON") from error
    return value
