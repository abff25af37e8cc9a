"""The data sets that a recipe can name: where their files are, and the one reader of their rows and of the user's own.

The public ones stand in sources.yaml. Files are those of the recipe's path, of data/sources/NAME of the checkout, or of
the hub's cache. Parquet is read by `datasets`, as a stream, which writes no cache. CSV and JSON are not: it makes
numbers of prompts in CSV that look so, and gives all rows of a JSON file one Arrow schema, which turns prompts that are
dates into time stamps, adds keys of other rows to tools, and refuses the file for one invalid character. Here every
cell of CSV is a text, and rows of JSON are parsed one by one. Files of the hub are located by `snapshot_download`,
because offline `datasets` looks only for what it prepared itself.

Rows are read by the usual column names. A data set that has others, or whose questions need a wording, has a function
from the row as published to one with the usual names.
"""

import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel

from drafthead.artifacts import digest
from drafthead.config.recipe import PromptSource, on_disk
from drafthead.data.prompts import ROLES, Conversation, Message, RowError, parse_json, parse_messages, token_ids
from drafthead.files import reading_external, sha256_file

Row = Mapping[str, Any]

_MESSAGES = ("messages", "conversations", "conversation")
_IDS = ("prompt_ids", "input_ids", "input_tokens", "tok_input")
# A row is read by the first that it has.
_SHAPES = (*_MESSAGES, *_IDS, "turns", "instruction", "prompt", "question", "problem_statement", "text")
_WITH_RESPONSE, _RESPONSES = ("instruction", "prompt", "question"), ("completion", "response", "output")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_DOCUMENT = ("document", "repo", "id", "question_id", "task_id", "prompt_id", "uuid", "module")
_LABELS = {"category", "source", "split", "metadata", "document"}
_OWN = {
    *_SHAPES, *_DOCUMENT, *_LABELS, *_RESPONSES, "response_ids", "input", "system", "tools", "functions", "text_input",
    "parallel_tool_calls",
}  # fmt: skip
# OpenAI's logs and batch files: what servers write into a response, and into a line of a batch.
_LOG = _LABELS | {
    "id", "object", "created", "model", "messages", "tools", "functions", "choices", "usage",
    "system_fingerprint", "service_tier", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params",
}  # fmt: skip
_BATCH = _LABELS | {"id", "custom_id", "method", "url", "body", "response", "error"}
_CHANGES_PROMPT = ("chat_template", "chat_template_kwargs", "reasoning_effort", "documents", "continue_final_message")
WITHHELD = "published without its text: run prepare_data.py of NVIDIA's specdec_bench, and give its file"
_FIX = "Fix it, fetch it again, or give another file"
_SHARD = re.compile(r"-\d+-of-(\d+)")
_EXTENSION = re.compile(r"\.(jsonl|json|parquet|csv)((?<!parquet)\.gz)?$")


class Entry(BaseModel, frozen=True):
    """One public data set.

    Attributes:
        category: workload of rows that name none.
        hub: id of the data set on the Hugging Face hub; empty when it is elsewhere.
        files: glob patterns of the data set's files below the repository or folder.
        heldout_files: glob patterns of the published test split; with one, all other files are for training.
        heldout_share: share of the documents that is never trained on, where no test split is published.
        fetch: without a hub id, the command that downloads it, with {folder} for where it is looked for.
        label: the column with categories of its own, if any.
        reminder: sentence that is printed whenever the data set is trained on.
    """

    category: str
    hub: str = ""
    files: tuple[str, ...] = ()
    heldout_files: tuple[str, ...] = ()
    heldout_share: float = 0.05
    fetch: str = ""
    label: str = ""
    reminder: str = ""


_LISTED = yaml.safe_load(Path(__file__).with_name("sources.yaml").read_text(encoding="utf-8"))
CATALOGUE = {name: Entry.model_validate(values) for name, values in _LISTED.items()}
LOCAL = Entry(category="all", label="category")  # a name that is not above


# ---- Files ----


@dataclass(frozen=True)
class Located:
    """A source with its files.

    Attributes:
        config: the source as the recipe describes it.
        entry: entry of the catalogue.
        files: files that are split by hash of the document, or all for training when there are `heldout_files`.
        heldout_files: files of the published test split.
        identity: hashes of the files, which change with any byte of any file.
    """

    config: PromptSource
    entry: Entry
    files: list[Path]
    heldout_files: list[Path]
    identity: dict[str, Any]

    @property
    def heldout_share(self) -> float:
        """Share of the documents of `files` that no stage may train on."""
        return self.config.heldout_share or (0.0 if self.heldout_files else self.entry.heldout_share)


def locate(config: PromptSource) -> Located:
    """Find the files of a source.

    Raises:
        FileNotFoundError: they are not on this machine; the message is the command that downloads them.
        ValueError: the name is unknown, or files are missing from a set.
    """
    if config.name not in CATALOGUE and config.path is None:
        raise ValueError(
            f"prompts.sources: {config.name} is not a known source ({', '.join(CATALOGUE)}); "
            "give it a path to read a file of your own"
        )
    entry = CATALOGUE.get(config.name, LOCAL)
    place = on_disk(config.path or f"data/sources/{config.name}")
    if config.path or place.is_dir():
        files, heldout = find(place, entry.files or ("*",)), find(place, entry.heldout_files)
        if place.is_file():
            files, place = [place], place.parent
        if not files and not heldout:
            patterns = ", ".join(entry.files) or "*.jsonl, *.json, *.parquet, *.csv"
            raise FileNotFoundError(f"prompts: {place} of {config.name} does not exist or has no file like {patterns}")
        sums = {str(file.relative_to(place)): sha256_file(file) for file in [*files, *heldout]}
        return Located(config, entry, files, heldout, {"files": sums})
    reason = "it is not on the hub"
    for local_only in (True, False) if entry.hub else ():
        try:
            return _snapshot(config, entry, local_only)
        except Exception as error:  # of the hub and whatever it downloads with; or the cache holds a part of a set
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise FileNotFoundError(
        f"prompts.sources: {config.name} is not on this machine ({reason}). On one with a network run\n"
        f"  {download_command(config.name, entry)}\n"
        "or give the source a path to its file or folder"
    )


def download_command(name: str, entry: Entry) -> str:
    """The command that brings a source to this machine."""
    if not entry.hub:
        return entry.fetch.format(folder=on_disk(f"data/sources/{name}"))
    patterns = " ".join(f'--include "{pattern}"' for pattern in (*entry.files, *entry.heldout_files))
    return f"hf download {entry.hub} --repo-type dataset {patterns}"


def _snapshot(config: PromptSource, entry: Entry, local_only: bool) -> Located:
    from huggingface_hub import snapshot_download

    patterns = [*entry.files, *entry.heldout_files]
    folder = Path(
        snapshot_download(entry.hub, repo_type="dataset", allow_patterns=patterns, local_files_only=local_only)
    )
    files, heldout = find(folder, entry.files), find(folder, entry.heldout_files)
    if not files or (entry.heldout_files and not heldout):
        raise FileNotFoundError(f"{folder} has no {' and '.join(patterns)}")
    # A snapshot's folder is named by its commit, which fixes every byte in it.
    names = sorted(str(file.relative_to(folder)) for file in [*files, *heldout])
    return Located(config, entry, files, heldout, {"hub": entry.hub, "commit": folder.name, "files": names})


def find(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files below `folder`, hidden ones left out, whose path or name fits one of the patterns; in order of their path.

    Raises:
        ValueError: a numbered shard (x-00000-of-00002) has not all its siblings.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _EXTENSION.search(path.name))
    # Not what editors, systems and the hub keep in hidden places.
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    names = [Path(pattern).name for pattern in patterns]
    fitting = [path for path in files if any(map(path.match, patterns))]
    fitting = fitting or [path for path in files if any(map(path.match, names))]
    sizes = Counter(_SHARD.sub(r"-of-\1", str(path)) for path in fitting)
    for path in fitting:
        shard, size = _SHARD.search(path.name), sizes[_SHARD.sub(r"-of-\1", str(path))]
        if shard and size < int(shard[1]):
            raise ValueError(f"{folder} has {size} of the {int(shard[1])} files of {path}; get the others")
    return fitting


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a file, as (file and line or row, row); empty lines are passed over.

    A .json file holds one object per line, as .jsonl does, or a list of objects.

    Raises:
        ValueError: the extension is unknown, or a row is not a JSON object in UTF-8.
    """
    extension = _EXTENSION.search(path.name)
    if extension is None:
        raise ValueError(f"{path}: the extension must be .parquet, or .jsonl, .json or .csv, plain or with .gz")
    if extension[1] in ("parquet", "csv"):
        with reading_external(path, _FIX):
            rows = _csv_rows(path) if extension[1] == "csv" else _parquet_rows(path)
            yield from ((f"{path}:row {number}", row) for number, row in enumerate(rows, start=1))
        return
    for line, data in _lines(path, may_be_list=extension[1] == "json"):
        try:
            value = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            start = f"{path}:{line}: not JSON in UTF-8 ({error})"
            raise ValueError(f"{start}: {data[:60]!r}; correct or remove it") from error
        for number, row in enumerate([value] if line else value, start=1):
            where = f"{path}:{line}" if line else f"{path}:row {number}"
            if not isinstance(row, dict):
                raise ValueError(f"{where}: found {row!r:.60}, wanted an object; correct or remove it")
            yield where, row


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pandas as pd

    with pd.read_csv(path, dtype=str, na_filter=False, chunksize=10_000) as parts:
        for part in parts:
            if not isinstance(part.index, pd.RangeIndex):
                raise ValueError("a row has more cells than there are columns")
            yield from ({str(name): text or None for name, text in row.items()} for row in part.to_dict("records"))


def _parquet_rows(path: Path) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset  # takes a second to import

    pattern = glob.escape(str(path))  # otherwise brackets are one
    rows = load_dataset("parquet", data_files=pattern, split="train", streaming=True)
    return ({name: _without_nulls(value) for name, value in row.items()} for row in rows)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object the keys that those of other rows have, tools and the arguments of calls among them."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):  # thousands of token ids are none
        return [_without_nulls(one) for one in value]
    return value


def _lines(path: Path, may_be_list: bool) -> Iterator[tuple[int, bytes]]:
    """Lines of a file that are not empty, with their numbers from 1; as line 0 a whole file that holds a list."""
    import fsspec  # comes with datasets

    with reading_external(path, _FIX), fsspec.open(str(path), "rb", compression="infer") as file:
        is_list = may_be_list and file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        file.seek(0)
        if is_list:
            yield 0, file.read()
            return
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


# ---- Rows ----


def read_row(row: Row, name: str) -> Conversation:
    """One row of the source `name` as a conversation, from the first of messages, token ids or a single question.

    A row without a document's name is named by its first user message, so that branches of a chat stay together; one
    of the user's own that declares its split is its own document.

    Raises:
        RowError: the row is no prompt, its split is neither train nor heldout, or a row of the user's own, or a message
            in it, has a key that nothing reads, at all or in a row of its shape.
    """
    entry, row = CATALOGUE.get(name, LOCAL), ADAPTERS.get(name, dict)(row)
    is_local, repairs = entry is LOCAL, list[str]()
    if is_local:
        row = _without_envelope(row, repairs)
    shape = next((key for key in _SHAPES if row.get(key) is not None), "prompt")
    messages: tuple[Message, ...] = ()
    ids, system, response_key = None, row.get("system"), ""
    if shape in _IDS:
        ids = token_ids(row[shape])
    else:
        chat = row[shape] if shape in _MESSAGES else _question_messages(row, shape)
        if is_local and shape in _WITH_RESPONSE:
            response_key = next((key for key in _RESPONSES if row.get(key)), "")
            chat = [*chat, *_response_messages(row[response_key])] if response_key else chat
        messages = parse_messages(chat, is_local, repairs)
        if system and not any(message["role"] in ("system", "developer") for message in messages):
            messages, system = parse_messages([{"role": "system", "content": system}, *messages], is_local), None
    was_read = {shape, response_key, "input" if shape == "instruction" else "", "" if system else "system"}
    texts = [message["content"] for message in messages]  # what stands in the chat too is not lost
    further_keys = [key for key in (*_SHAPES, *_RESPONSES, "system", "input") if key not in was_read and row.get(key)]
    if is_local and (unread := [key for key in further_keys if row[key] not in texts]):
        raise RowError(f"{' and '.join(unread)} would not be read: a row has one of {', '.join(_SHAPES)}")
    response_ids = row.get("response_ids") if is_local else None
    if response_ids is not None and ids is None:
        raise RowError("response_ids without prompt_ids: a response to text is an assistant's message in `messages`")
    split = row.get("split") if is_local else None
    if split not in (None, "train", "heldout"):
        raise RowError(f'split is {split!a:.20}; write "train" or "heldout", or leave it out to split by document')
    tools = _tools(row)
    first_question = next((" ".join(m["content"].casefold().split()) for m in messages if m["role"] == "user"), None)
    named = next((row[key] for key in _DOCUMENT if row.get(key) is not None), None)
    document = digest(list(ids) if ids else first_question)[:16] if named in (None, "") else str(named)
    if split:
        document = digest([split, messages, ids])[:16]
    return Conversation(
        messages,
        document=document,
        category=_name(row.get(entry.label), repairs),
        tools=tuple(tools) or None,
        prompt_ids=ids,
        response_ids=None if response_ids is None else token_ids(response_ids),
        text=str(row.get("text_input") or ""),
        split=split,
        source=_name(row.get("source"), repairs) if is_local else None,
        repairs=tuple(repairs),
    )


def _without_envelope(row: Row, repairs: list[str]) -> Row:
    """A row of the user's own with the usual names: a log or a batch file of OpenAI's API is taken apart.

    The id of a request names no document: a chat sends one with every turn.

    Raises:
        RowError: a key is unknown, or the row holds no prompt.
    """
    is_batch, is_log = row.get("body") is not None or row.get("custom_id") is not None, row.get("choices") is not None
    known = _BATCH if is_batch else _LOG if is_log else _OWN
    if unknown := sorted({str(key) for key, value in row.items() if value is not None} - known):
        raise RowError(f"unknown key {', '.join(unknown)}; known: {', '.join(sorted(known))} (metadata is not read)")
    if not is_batch and not is_log:
        return row
    if is_batch and row.get("body") is None:
        raise RowError(
            "custom_id without body: the output of a batch does not have its prompts; add to each line, as `body`, "
            "that of the line of the batch's input with the same custom_id"
        )
    request = _need_object(row["body"], "body") if is_batch else row
    if request.get("messages") is None:
        raise RowError(
            "body has no messages: only requests to /v1/chat/completions have a prompt that is a chat"
            if is_batch
            else "choices without messages: a response of OpenAI's API does not have its prompt; add to each row the "
            "`messages` of its request"
        )
    repairs += [f"{key} of a request is not read" for key in _CHANGES_PROMPT if request.get(key)]
    chat = parse_json(request["messages"])
    if not isinstance(chat, list) or not chat:
        raise RowError("messages must be a non-empty list")
    if is_log or row.get("response") is not None or row.get("error"):
        chat = [*chat, *_logged_response(row, chat, repairs)]
    tools = {key: request.get(key) for key in ("tools", "functions")}
    return {**{key: row.get(key) for key in _LABELS}, "messages": chat, **tools}


def _logged_response(row: Row, chat: list[Any], repairs: list[str]) -> list[Message]:
    """The message of the first choice, with its finish_reason; none where the request failed or no text came."""
    response = row if row.get("choices") is not None else _need_object(row.get("response") or {}, "response")
    status = response.get("status_code", 200)
    response = _need_object(response["body"], "response.body") if response.get("body") is not None else response
    choices = parse_json(response.get("choices") or [])
    if row.get("error") or status != 200 or not choices:
        repairs.append("a request without a response, or with an error: its prompt is read")
        return []
    choice = _need_object(choices[0] if isinstance(choices, list) else choices, "choices[0]")
    message = _need_object(choice.get("message"), "choices[0].message")
    if isinstance(chat[-1], Mapping) and ROLES.get(str(chat[-1].get("role"))) == "assistant":
        raise RowError("messages end with an assistant's, and choices[0] is another: one of them would not be read")
    if len(choices) > 1:
        repairs.append("choices after the first are not read")
    if not any(message.get(key) for key in ("content", "refusal", "tool_calls", "function_call")):
        repairs.append("a response without text: its prompt is read")
        return []
    return [{"role": "assistant", **message, "finish_reason": choice.get("finish_reason")}]


def _tools(row: Row) -> list[dict[str, Any]]:
    """The definitions in `tools`, or in `functions`, as OpenAI's format before that has them."""
    key = "tools" if row.get("tools") else "functions"
    tools = parse_json(row.get(key) or [])
    tools = tools if isinstance(tools, list) else [tools]
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"{key} must be a list of objects")
    return tools if key == "tools" else [{"type": "function", "function": tool} for tool in tools]


def _need_object(value: Any, name: str) -> Row:
    value = parse_json(value)
    if not isinstance(value, Mapping):
        raise RowError(f"{name} is not an object")
    return value


def _question_messages(row: Row, shape: str) -> list[Any]:
    """The messages of a row with a single question; in TRL's form `prompt` is a list of them."""
    text = _question(row, shape)
    return text if shape == "prompt" and isinstance(text, list) else [{"role": "user", "content": text}]


def _response_messages(value: Any) -> list[Any]:
    """The response to it: a text, a message or a list of them."""
    if isinstance(value, list):
        return value
    return [value if isinstance(value, Mapping) else {"role": "assistant", "content": value}]


def _question(row: Row, shape: str) -> Any:
    """The text of a row with a single question; later `turns` are about a response that is not there yet."""
    text = _need(row, shape)
    if shape == "turns":
        if not isinstance(text, list) or not text:
            raise RowError("no turns")
        return text[0]
    return f"{text}\n\n{row['input']}" if shape == "instruction" and row.get("input") else text


def _name(value: Any, repairs: list[str]) -> str | None:
    """A category or a source, without what would break a line or steer a terminal."""
    name, count = _CONTROL.subn(" ", "" if value is None else str(value))
    if count:
        repairs.append("control characters in a category or a source are read as spaces")
    return name or None


def _need(row: Row, name: str) -> Any:
    if row.get(name) is None:
        alternatives = f" (or another of {', '.join(_SHAPES)})" if name in _SHAPES else ""
        raise RowError(f"no column {name}{alternatives}; found: {', '.join(map(str, row)) or 'none'}")
    return row[name]


def share_gpt(row: Row) -> Row:
    """Long chats are published in pieces ID_0, ID_17, ... of one document."""
    return {**row, "id": re.sub(r"_\d+$", "", str(row.get("id") or ""))}


def human_eval(row: Row) -> Row:
    """A function to complete; the instruction in front is ours."""
    return {**row, "prompt": f"Complete this Python function.\n\n{_need(row, 'prompt')}"}


def instruct_coder(row: Row) -> Row:
    """Code to edit and what to do with it, in the wording of vLLM's benchmark."""
    code = str(row.get("input") or "")
    request = f"{_need(row, 'instruction')} Just output the code, do not include any explanation."
    return {"prompt": f"{code}\n\n{request}" if code.strip() else request}


def writing_prompts(row: Row) -> Row:
    """One row per story. "[ WP ]" is the forum's tag."""
    prompt = re.sub(r"^\s*\[\s*\w+\s*\]\s*", "", str(_need(row, "prompt")))
    return {"prompt": f"Write a short story for this prompt.\n\n{prompt}"}


def burst_gpt(row: Row) -> Row:
    """A trace of lengths: the text is filler of that many words, good for throughput only.

    Raises:
        RowError: the request failed (a length of 0), or a length is no number.
    """
    lengths = [_need(row, f"{side} tokens") for side in ("Request", "Response")]
    try:
        count, response = map(int, lengths)
    except (TypeError, ValueError, OverflowError):
        count = response = 0
    if count < 1 or response < 1:
        raise RowError("a failed request")
    drawn = np.random.default_rng(int(digest({k: str(v) for k, v in row.items()})[:12], 16)).integers(0, 26, (count, 3))
    return {"prompt": " ".join("".join(chr(97 + letter) for letter in word) for word in drawn.tolist())}


def speed_bench(row: Row) -> Row:
    """A question with one or several turns; 494 of the 880 are published as a marker instead of their text.

    Raises:
        RowError: it is one of them.
    """
    if "USING SPECDEC_BENCH" in str(row.get("turns")):
        raise RowError(WITHHELD)
    return row


ADAPTERS: dict[str, Callable[[Row], Row]] = {
    "sharegpt": share_gpt,
    "humaneval": human_eval,
    "instruct-coder": instruct_coder,
    "creative-writing": writing_prompts,
    "burstgpt": burst_gpt,
    "speed-bench": speed_bench,
}
