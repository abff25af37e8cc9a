"""The prompts artifact, one Parquet file per split, and the one parser of conversations in every prompt file.

A prompt is a conversation up to the message that the target responds to, or the token ids of one that was rendered
before. Its id is a hash of its content, so the same prompt has the same id in every source, split and run.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from drafthead.artifacts import ArtifactError, digest, read_json
from drafthead.files import atomic_path, sha256_file, write_json

Message = dict[str, Any]
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
        response: the assistant's message that follows in the data, with its "thinking", with "weight" 0 where it is
            not to be learned, and with a "finish_reason" other than "stop". Not part of the id, and only stored where a
            recipe trains on it (responses.regenerate false).
        response_ids: token ids of the response that follows `prompt_ids` in the data.
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


_REQUIRED = ("id", "source", "category", "messages")
_JSON, _IDS = ("messages", "tools", "answer"), ("prompt_ids", "response_ids")
# The first artifacts called a response so.
_COLUMNS = (*_REQUIRED, "prompt_ids", "tools", "document", "answer", "response_ids")
_BATCH = 10_000  # rows, of which another copy is in memory while they are written


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write one split as Parquet; an optional column that no prompt of the split uses is left out."""
    used = [name for name in _COLUMNS if name in _REQUIRED or any(_value(prompt, name) for prompt in prompts)]
    schema = pa.schema({name: pa.list_(pa.int32()) if name in _IDS else pa.string() for name in used})
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for start in range(0, max(len(prompts), 1), _BATCH):
            batch = prompts[start : start + _BATCH]
            writer.write_table(pa.table({name: [_value(p, name) for p in batch] for name in used}, schema=schema))


def read_prompts(directory: Path, split: str) -> list[Prompt]:
    """Read one split of a prompts artifact.

    Raises:
        ArtifactError: the split's file is missing or not readable.
    """
    path = directory / f"{split}.parquet"
    if not path.exists():
        raise ArtifactError(f"{path} does not exist; run: python data_gen/prompts.py RECIPE")
    return [_from_row(row) for row in pq.read_table(path).to_pylist()]


def _value(prompt: Prompt, column: str) -> Any:
    value = getattr(prompt, "response" if column == "answer" else column)
    return json.dumps(value, ensure_ascii=False) if column in _JSON and value is not None else value


def _from_row(row: dict[str, Any]) -> Prompt:
    values: dict[str, Any] = {n: json.loads(value) if n in _JSON and value else value for n, value in row.items()}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    values["response"] = values.pop("answer", None)
    return Prompt(**values)


# ---- The ids of the prompts that a head was trained on ----
#
# They are kept with the head, so that no evaluation uses them by mistake. A head's manifest names its run, a run its
# states, and so on back to the prompts, but those folders stay behind when a head is moved. So a run notes the ids
# themselves when it begins, with those of the run that its weights come from, and every head that is exported from it
# has a copy, listed in its manifest. An id is a hash of a prompt's content, so prompts of other recipes are recognised
# too.

TRAINED_ON = "training_prompts.json"


def write_trained_on(directory: Path, ids: Iterable[str]) -> None:
    """Write the ids of the training and validation prompts into a head's or a run's directory, before its manifest."""
    write_json(directory / TRAINED_ON, {"ids": sorted(ids)})


def read_trained_on(directory: Path, manifest: dict[str, Any]) -> set[str] | None:
    """Ids of the prompts that a head was trained on; None when its manifest lists no such file.

    Raises:
        ArtifactError: the file is not the one that the manifest lists.
    """
    listed = manifest["files"].get(TRAINED_ON)
    if listed is None:
        return None
    path = directory / TRAINED_ON
    if not path.is_file() or sha256_file(path) != listed["sha256"]:
        raise ArtifactError(f"{path} is missing or not what the head's manifest lists; export the head again")
    return noted_prompts(directory)


def noted_prompts(run_dir: Path) -> set[str] | None:
    """Ids of the prompts behind a run's weights; None when there is no such file, where they are not known."""
    path = run_dir / TRAINED_ON
    return set(read_json(path)["ids"]) if path.is_file() else None


# ---- One conversation, whatever its data set calls roles and texts ----
#
# Messages come out as {"role", "content"} in the roles of chat templates. Refused, with a reason for the caller to
# count or to raise: empty turns, unknown roles, images, tool calls that are none, and text that is not valid Unicode.
# What is changed beyond spelling is listed in `repairs`, for the caller to count.

_SPELLINGS = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"),
    "tool": ("tool", "function", "observation", "ipython"),
}
ROLES = {spelling: role for role, spellings in _SPELLINGS.items() for spelling in spellings}
THOUGHT_KEYS = ("thinking", "reasoning_content", "reasoning")  # as gpt-oss, Qwen and others name it
_BEFORE_RESPONSE = ("user", "tool")  # the target responds to one of these
_TEXT_KEYS = ("content", "value", "refusal")  # a refusal is OpenAI's place for the text of one
# As fine-tuning formats say whether a message is learned: OpenAI's, then those of axolotl and others.
_LEARNED_KEYS = ("weight", "train", "trainable", "loss", "loss_mask")
_RESPONSE_ONLY = ("thinking", "weight", "finish_reason")  # what a server is not sent of earlier turns
_MESSAGE_KEYS = {
    "role", "from", *_TEXT_KEYS, *THOUGHT_KEYS, *_LEARNED_KEYS, "tool_calls", "function_call", "name", "tool_call_id",
    "finish_reason", "annotations", "metadata",
}  # fmt: skip


class RowError(ValueError):
    """A row is not a conversation; the message gives the reason without the row's own text."""


@dataclass(frozen=True)
class Conversation:
    """What an adapter makes of one row.

    Attributes:
        messages: normalised by `parse_messages`; empty when there are only `prompt_ids`.
        document: rows with the same key are cut from the same text and never lie in two splits.
        category: category within the source; None: the source's default.
        tools: definitions for the chat template.
        prompt_ids: token ids to be read as they are.
        response_ids: the response to `prompt_ids`, likewise.
        text: the text of `prompt_ids`, where the row has it; only to look for overlaps.
        split: "train" or "heldout", where the row declares it.
        source: data set that the row names.
        repairs: what was changed or not read of the row, as sentences to be counted.

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
    repairs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            json.dumps({**vars(self), "prompt_ids": None, "response_ids": None}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RowError("text that is not valid Unicode (a lone surrogate)") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise RowError("tools or tool_calls are not valid JSON") from error


def parse_messages(rows: Any, strict: bool = False, repairs: list[str] | None = None) -> tuple[Message, ...]:
    """Messages in chat templates' roles, without empty system messages and what an assistant says before any user.

    An assistant's message that its data set marks as not to be learned has "weight" 0.

    Args:
        rows: a list of messages, or its JSON text.
        strict: refuse keys that nothing reads.
        repairs: gets a sentence for everything that was changed.

    Raises:
        RowError: there is no user, or a message has an unknown role, no text, or a tool call that is none.
    """
    repairs = [] if repairs is None else repairs
    rows = parse_json(rows)  # as a CSV file has them
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise RowError("messages must be a non-empty list")
    parsed = [_parse_message(row, strict, repairs) for row in rows]
    filled = [m for m in parsed if m["role"] not in ("system", "developer") or m["content"]]
    if len(filled) < len(parsed):
        repairs.append("an empty system message is left out")
    # Public chats are often cut in pieces: a piece may begin with the end of a response.
    first = next((i for i, m in enumerate(filled) if m["role"] in _BEFORE_RESPONSE), len(filled))
    chat = [m for i, m in enumerate(filled) if i >= first or m["role"] != "assistant"]
    if not any(m["role"] == "user" for m in chat):
        raise RowError("no user message")
    if len(chat) < len(filled):
        repairs.append("what an assistant says before the first question is left out")
    for message in chat:
        if not message["content"] and not message.get("tool_calls") and message["role"] != "tool":
            raise RowError(f"the text of a message of role {message['role']} is empty")
    return tuple(chat)


def split_turns(
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
    sent = [{key: value for key, value in message.items() if key not in _RESPONSE_ONLY} for message in messages]
    after = [m if m and m["role"] == "assistant" else None for m in following]
    return [(tuple(sent[: end + 1]), after[end]) for end in chosen]


def _parse_message(row: Any, strict: bool, repairs: list[str]) -> Message:
    if not isinstance(row, Mapping):
        raise RowError("a message is not an object")
    values = {str(key): value for key, value in row.items() if value is not None}
    if strict and (unknown := sorted(values.keys() - _MESSAGE_KEYS)):
        raise RowError(
            f"unknown key {', '.join(f'{key!a:.40}' for key in unknown)} of a message; known: "
            f"{', '.join(sorted(_MESSAGE_KEYS))} (metadata and annotations are not read)"
        )
    named = values.get("role", values.get("from"))
    role = ROLES.get(str(named).strip().lower())
    if role is None:
        raise RowError(f"unknown role {str(named)[:20]!r}; known roles: {', '.join(ROLES)}")
    texts = dict.fromkeys(filter(None, (_text(values.get(key)) for key in _TEXT_KEYS)))
    if strict and len(texts) > 1:
        raise RowError(f"several of {', '.join(_TEXT_KEYS)} in one message: only one would be read")
    message: Message = {"role": role, "content": next(iter(texts), "")}
    if name := values.get("name"):
        message["name"] = str(name)
    if role == "tool" and values.get("tool_call_id"):
        message["tool_call_id"] = str(values["tool_call_id"])
    is_context = _is_context(values)
    if role == "assistant":
        thought = next((values[key] for key in THOUGHT_KEYS if values.get(key)), None)
        before, _, after = message["content"].partition("</think>")
        calls = _calls(values, repairs)
        if thought is None and before.lstrip().startswith("<think>") and (after.strip() or calls):
            thought, message["content"] = before.lstrip().removeprefix("<think>"), _text(after.lstrip("\n"))
            thought = thought if thought.strip() else None
        message |= {"thinking": thought} if isinstance(thought, str) else {}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"weight": 0} if is_context else {}
        finish_reason = values.get("finish_reason")
        message |= {} if finish_reason in (None, "stop") else {"finish_reason": str(finish_reason)}
    return message


def _is_context(values: Mapping[str, Any]) -> bool:
    """Whether a message's data set says that it is not to be learned, with 0 or false."""
    flags = {key: values[key] for key in _LEARNED_KEYS if key in values}
    for key, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise RowError(f"{key} of a message is {value!a:.20}; it may be 0 or 1, false or true")
    return 0 in flags.values()


def _calls(values: Mapping[str, Any], repairs: list[str]) -> list[Any]:
    """The tool calls of a message, their arguments an object as in vLLM (0.32, renderers/chat_utils.py), whatever text
    they are stored as: chat templates write them as JSON themselves."""
    calls, function = parse_json(values.get("tool_calls") or []), values.get("function_call")
    if function and function != "none":  # OpenAI's format before that of tools
        function = parse_json(function)
        if not isinstance(function, Mapping):
            raise RowError("function_call is not an object")
        if any(value is not None for value in function.values()):  # in Arrow's tables every message has one
            if calls:
                raise RowError("function_call and tool_calls in one message: only one would be read")
            calls = {"type": "function", "function": function}
    return [_call(call, repairs) for call in (calls if isinstance(calls, list) else [calls])] if calls else []


def _call(call: Any, repairs: list[str]) -> Message:
    if isinstance(call, Mapping) and call.get("function") is not None:
        return {**call, "function": _function(call["function"], repairs)}
    return _function(call, repairs)  # without the frame of OpenAI's format


def _function(function: Any, repairs: list[str]) -> Message:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError("a tool call is no object with the name of a function")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        repairs.append("a tool call without arguments is read as one with {}")
        arguments = {}
    with suppress(RowError):
        arguments = parse_json(arguments)
    if not isinstance(arguments, Mapping):
        raise RowError("the arguments of a tool call are not a JSON object")
    return {**function, "arguments": arguments}


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
