"""The public data sets that a recipe can name, and one adapter per schema: a row as published -> a conversation.

An adapter names the columns it reads; `need` turns a missing one into an error that lists those that are there.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drafthead.artifacts import digest
from drafthead.data.conversations import (
    Conversation,
    Message,
    RowError,
    parse_json,
    parse_messages,
    question,
    token_ids,
)

Row = Mapping[str, Any]
Adapter = Callable[[Row], Conversation]


def need(row: Row, *names: str) -> Any:
    """The value of the first of `names` that the row has.

    Raises:
        RowError: it has none of them: another data set, or another version of it.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise RowError(f"no column {' or '.join(names)}; found: {', '.join(map(str, row)) or 'none'}")


def sharegpt(row: Row) -> Conversation:
    """ShareGPT: conversations of from/value. Long chats are published in pieces ID_0, ID_17, ... of one document."""
    messages = parse_messages(need(row, "conversations"))
    identity = row.get("id")
    return Conversation(messages, re.sub(r"_\d+$", "", str(identity)) if identity else _document(messages))


def mlperf(row: Row) -> Conversation:
    """MLPerf gpt-oss: token ids with Harmony applied (`input_tokens`, `tok_input` in older files).

    Every row is its own document; the accuracy set repeats its questions, and equal ids are one document.
    """
    return replace(_pretokenised(row), category=str(row.get("dataset") or "") or None)


def swe_bench(row: Row) -> Conversation:
    """SWE-bench: the issue's text. The document is the repository: its issues quote each other and its code."""
    return Conversation(question(need(row, "problem_statement")), str(need(row, "repo")))


def turns(row: Row) -> Conversation:
    """MT-Bench and Spec-Bench: the first of `turns`; later ones are about a response that is not there yet."""
    return Conversation(_first_turn(row), f"question {need(row, 'question_id')}", row.get("category"))


def human_eval(row: Row) -> Conversation:
    """HumanEval: a function to complete; the instruction in front is ours."""
    return Conversation(question(f"Complete this Python function.\n\n{need(row, 'prompt')}"), str(need(row, "task_id")))


def gsm8k(row: Row) -> Conversation:
    """GSM8K: the question; its published solution is not used."""
    return _own_document(question(need(row, "question")))


def instruct_coder(row: Row) -> Conversation:
    """InstructCoder: code to edit and what to do with it, in the wording of vLLM's benchmark."""
    code, task = row.get("input") or "", need(row, "instruction")
    request = f"{task} Just output the code, do not include any explanation."
    return _own_document(question(f"{code}\n\n{request}" if code.strip() else request))


def writing_prompts(row: Row) -> Conversation:
    """WritingPrompts: one row per story; equal prompts are one document. "[ WP ]" is the forum's tag."""
    prompt = re.sub(r"^\s*\[\s*\w+\s*\]\s*", "", need(row, "prompt"))
    return _own_document(question(f"Write a short story for this prompt.\n\n{prompt}"))


def chat(row: Row) -> Conversation:
    """UltraChat, Nemotron, Perfect-Blend, Hermes JSON mode: a list of messages under one of the usual names."""
    messages = parse_messages(need(row, "messages", "conversations", "conversation"))
    tools = parse_json(row["tools"]) if row.get("tools") else []
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
    count, response = int(need(row, "Request tokens")), int(need(row, "Response tokens"))
    if count < 1 or response < 1:
        raise RowError("a failed request")
    drawn = np.random.default_rng(int(digest({k: str(v) for k, v in row.items()})[:12], 16)).integers(0, 26, (count, 3))
    words = " ".join("".join(chr(97 + letter) for letter in word) for word in drawn.tolist())
    return _own_document(question(words))


def own_file(row: Row) -> Conversation:
    """A file of the user's own: the usual column names, most specific first.

    Messages, `prompt_ids` (or `input_ids`), `turns`, an issue, instruction with input, or a prompt. Beside them
    `category`, `source`, `split`, `tools` and the document. A row that declares its split is its own document.

    Raises:
        RowError: the row is no prompt, or its split is neither train nor heldout.
    """
    if any(row.get(name) is not None for name in ("messages", "conversations", "conversation")):
        found = chat(row)
    elif any(row.get(name) is not None for name in _ID_COLUMNS):
        found = _pretokenised(row)
    elif row.get("turns") is not None:
        found = _own_document(_first_turn(row))
    elif row.get("instruction") is not None:
        found = _own_document(question("\n\n".join(filter(None, [row["instruction"], row.get("input")]))))
    else:
        text = need(row, "prompt", "question", "problem_statement", "text")
        found = _own_document(question(text, row.get("system")))
    split = row.get("split")
    if split not in (None, "train", "heldout"):
        raise RowError(f'split is {split!a:.20}; write "train" or "heldout", or leave it out to split by document')
    key = next((str(row[name]) for name in ("document", "repo", "id", "question_id") if row.get(name)), found.document)
    category, source = (str(row[name]) if row.get(name) else None for name in ("category", "source"))
    return replace(found, document="" if split else key, category=category, split=split, source=source)


_ID_COLUMNS = ("prompt_ids", "input_ids", "input_tokens", "tok_input")


def _pretokenised(row: Row) -> Conversation:
    ids = token_ids(need(row, *_ID_COLUMNS))
    return Conversation((), digest(list(ids))[:16], prompt_ids=ids, text=str(row.get("text_input") or ""))


def _first_turn(row: Row) -> tuple[Message, ...]:
    questions = need(row, "turns")
    if isinstance(questions, str) or not questions:
        raise RowError("no turns")
    return question(questions[0])


def _document(messages: tuple[Message, ...]) -> str:
    """The key of a conversation without a name: its first user message, so that branches of it stay together."""
    first = next(m["content"] for m in messages if m["role"] == "user")
    return digest(" ".join(first.casefold().split()))[:16]


def _own_document(messages: tuple[Message, ...]) -> Conversation:
    return Conversation(messages, _document(messages))


_EVALUATION = 1.0  # benchmarks: every prompt is held out


@dataclass(frozen=True)
class Entry:
    """One public data set.

    Attributes:
        adapter: reads its rows.
        category: workload of rows that name none.
        hub: id on the Hugging Face hub; empty when it is elsewhere.
        files: glob patterns of its files below the repository or folder.
        heldout_files: of its published test split; with one, the others are all for training.
        heldout_share: share of the documents that is never trained on, where no test split is published.
        fetch: without a hub id, the command that downloads it, with {folder} for where it is looked for.
        reminder: printed whenever it is trained on.
        own_category: whether rows name categories of their own.
        throughput_only: no text worth drafting; refused for training.
    """

    adapter: Adapter
    category: str
    hub: str = ""
    files: tuple[str, ...] = ()
    heldout_files: tuple[str, ...] = ()
    heldout_share: float = 0.05
    fetch: str = ""
    reminder: str = ""
    own_category: bool = False
    throughput_only: bool = False


_MLPERF_REMINDER = (
    "mlperf-gpt-oss is the prompts of the MLPerf Inference benchmark itself: a head meant for an official MLPerf "
    "submission must not be trained on them. Their licence is not stated; ask MLCommons before you publish a head."
)

# Licences, as their publishers state them, are in docs/prompts.md.
CATALOGUE: dict[str, Entry] = {
    "sharegpt": Entry(
        sharegpt, "sharegpt", hub="anon8231489123/ShareGPT_Vicuna_unfiltered",
        files=("ShareGPT_V3_unfiltered_cleaned_split.json",),
    ),
    "mlperf-gpt-oss": Entry(
        mlperf, "mlperf", files=("*perf_eval_ref.parquet",), heldout_share=0.25, reminder=_MLPERF_REMINDER,
        fetch="mkdir -p {folder} && bash <(curl -s https://raw.githubusercontent.com/mlcommons/r2-downloader/refs/"
        "heads/main/mlc-r2-downloader.sh) -d {folder} "
        "https://inference.mlcommons-storage.org/metadata/gpt-oss-data.uri",
    ),
    "swe-bench": Entry(
        swe_bench, "swe-bench", hub="princeton-nlp/SWE-bench",
        files=("data/train-*.parquet",), heldout_files=("data/test-*.parquet",),
    ),
    "mt-bench": Entry(
        turns, "mt-bench", hub="philschmid/mt-bench", files=("*.jsonl", "*.parquet"),
        heldout_share=_EVALUATION, own_category=True,
    ),
    "humaneval": Entry(
        human_eval, "code", hub="openai/openai_humaneval", files=("openai_humaneval/test-*.parquet",),
        heldout_share=_EVALUATION,
    ),
    "gsm8k": Entry(
        gsm8k, "math", hub="openai/gsm8k",
        files=("main/train-*.parquet",), heldout_files=("main/test-*.parquet",),
    ),
    "instruct-coder": Entry(
        instruct_coder, "code-editing", hub="likaixin/InstructCoder",
        files=("train*.json*", "data/train-*.parquet"),
    ),
    "spec-bench": Entry(
        turns, "spec-bench", files=("question.jsonl",), heldout_share=_EVALUATION, own_category=True,
        fetch="curl --create-dirs -L -o {folder}/question.jsonl "
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
    "creative-writing": Entry(
        writing_prompts, "creative-writing", hub="euclaise/writingprompts",
        files=("data/train-*.parquet",), heldout_files=("data/test-*.parquet",),
    ),
    "structured-output": Entry(
        chat, "structured-output", hub="NousResearch/hermes-function-calling-v1",
        files=("json-mode-singleturn.json",), heldout_share=0.2,
    ),
    "ultrachat-200k": Entry(
        chat, "chat", hub="HuggingFaceH4/ultrachat_200k",
        files=("data/train_sft-*.parquet",), heldout_files=("data/test_sft-*.parquet",),
    ),
    "magpie": Entry(
        magpie, "magpie", hub="Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", files=("data/train-*.parquet",),
        own_category=True,
    ),
    "nemotron-v2": Entry(
        chat, "nemotron", hub="nvidia/Nemotron-Post-Training-Dataset-v2", own_category=True,
        files=("data/stem-*.parquet", "data/chat-*.parquet", "data/math-*.parquet", "data/code-*.parquet"),
    ),
    "perfect-blend": Entry(
        chat, "perfect-blend", hub="mlabonne/open-perfectblend", files=("data/train-*.parquet",), own_category=True
    ),
    "burstgpt": Entry(
        burst_gpt, "throughput-only", files=("*.csv",), heldout_share=_EVALUATION, throughput_only=True,
        fetch="curl --create-dirs -L -o {folder}/BurstGPT_1.csv "
        "https://raw.githubusercontent.com/HPMLL/BurstGPT/main/data/BurstGPT_1.csv",
    ),
}  # fmt: skip

LOCAL = Entry(own_file, "all", own_category=True)  # a name that is not above
