"""The public data sets that a recipe can name, and the one reader of their rows and of the user's own.

Rows are read by the usual column names. A data set that has others, or whose questions need a wording, has a function
from the row as published to one with the usual names.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

_MESSAGES = ("messages", "conversations", "conversation")
_IDS = ("prompt_ids", "input_ids", "input_tokens", "tok_input")
_QUESTION = ("prompt", "question", "problem_statement", "text")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_DOCUMENT = ("document", "repo", "id", "question_id", "task_id", "prompt_id", "uuid", "module")
_OWN = {
    *_MESSAGES, *_IDS, *_QUESTION, *_DOCUMENT, "response_ids", "turns", "instruction", "input", "system", "tools",
    "text_input", "category", "source", "split", "metadata",
}  # fmt: skip


def read_row(row: Row, entry: "Entry") -> Conversation:
    """One row as a conversation: messages, token ids or a single question, whichever column is there first.

    A row without a document's name is named by its first user message, so that branches of a chat stay together; one
    of the user's own that declares its split is its own document.

    Raises:
        RowError: the row is no prompt, its split is neither train nor heldout, or a row of the user's own has a key
            that nothing reads.
    """
    row, own = entry.adapt(row), entry is LOCAL
    if own and (unknown := sorted({str(key) for key, value in row.items() if value is not None} - _OWN)):
        raise RowError(f"unknown key {', '.join(unknown)}; known: {', '.join(sorted(_OWN))} (metadata is not read)")
    messages: tuple[Message, ...] = ()
    ids = None
    if (chat := _first(row, *_MESSAGES)) is not None:
        messages = parse_messages(chat)
    elif (given := _first(row, *_IDS)) is not None:
        ids = token_ids(given)
    else:
        messages = question(_question(row), row.get("system"))
    response_ids = row.get("response_ids") if own else None
    if response_ids is not None and ids is None:
        raise RowError("response_ids without prompt_ids: an answer to text is an assistant's message in `messages`")
    split = row.get("split") if own else None
    if split not in (None, "train", "heldout"):
        raise RowError(f'split is {split!a:.20}; write "train" or "heldout", or leave it out to split by document')
    tools = parse_json(row.get("tools") or [])
    first_question = next((" ".join(m["content"].casefold().split()) for m in messages if m["role"] == "user"), None)
    document = str(_first(row, *_DOCUMENT) or "") or digest(list(ids) if ids else first_question)[:16]
    return Conversation(
        messages,
        document="" if split else document,
        category=_name(row.get(entry.label)),
        tools=tuple(tools if isinstance(tools, list) else [tools]) or None,
        prompt_ids=ids,
        response_ids=None if response_ids is None else token_ids(response_ids),
        text=str(row.get("text_input") or ""),
        split=split,
        source=_name(row.get("source")) if own else None,
    )


def _question(row: Row) -> Any:
    """The text of a row with a single question; later `turns` are about a response that is not there yet."""
    turns, instruction = row.get("turns"), row.get("instruction")
    if turns is not None:
        if not isinstance(turns, list) or not turns:
            raise RowError("no turns")
        return turns[0]
    if instruction is not None:
        return f"{instruction}\n\n{row['input']}" if row.get("input") else instruction
    return _need(row, *_QUESTION)


def _name(value: Any) -> str | None:
    """A category or a source, without what would break a line or steer a terminal."""
    return _CONTROL.sub(" ", str(value or "")) or None


def _first(row: Row, *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _need(row: Row, *names: str) -> Any:
    found = _first(row, *names)
    if found is None:
        raise RowError(f"no column {' or '.join(names)}; found: {', '.join(map(str, row)) or 'none'}")
    return found


def share_gpt(row: Row) -> Row:
    """Long chats are published in pieces ID_0, ID_17, ... of one document."""
    return {**row, "id": re.sub(r"_\d+$", "", str(row.get("id") or ""))}


def human_eval(row: Row) -> Row:
    """A function to complete; the instruction in front is ours."""
    return {**row, "prompt": f"Complete this Python function.\n\n{_need(row, 'prompt')}"}


def instruct_coder(row: Row) -> Row:
    """Code to edit and what to do with it, in the wording of vLLM's benchmark."""
    code = row.get("input") or ""
    request = f"{_need(row, 'instruction')} Just output the code, do not include any explanation."
    return {"prompt": f"{code}\n\n{request}" if code.strip() else request}


def writing_prompts(row: Row) -> Row:
    """One row per story. "[ WP ]" is the forum's tag."""
    prompt = re.sub(r"^\s*\[\s*\w+\s*\]\s*", "", str(_need(row, "prompt")))
    return {"prompt": f"Write a short story for this prompt.\n\n{prompt}"}


def burst_gpt(row: Row) -> Row:
    """A trace of lengths: the text is filler of that many words, good for throughput only.

    Raises:
        RowError: the request failed (a length of 0).
    """
    count, response = int(_need(row, "Request tokens")), int(_need(row, "Response tokens"))
    if count < 1 or response < 1:
        raise RowError("a failed request")
    drawn = np.random.default_rng(int(digest({k: str(v) for k, v in row.items()})[:12], 16)).integers(0, 26, (count, 3))
    return {"prompt": " ".join("".join(chr(97 + letter) for letter in word) for word in drawn.tolist())}


def speed_bench(row: Row) -> Row:
    """A question with one or several turns; 494 of the 880 are published as a marker instead of their text.

    Raises:
        RowError: it is one of them.
    """
    if any("USING SPECDEC_BENCH" in str(turn) for turn in row.get("turns") or ()):
        raise RowError("published without its text: run prepare_data.py of NVIDIA's specdec_bench, and give its file")
    return row


@dataclass(frozen=True)
class Entry:
    """One public data set.

    Attributes:
        category: workload of rows that name none.
        hub: id on the Hugging Face hub; empty when it is elsewhere.
        files: glob patterns of its files below the repository or folder.
        heldout_files: of its published test split; with one, the others are all for training.
        heldout_share: share of the documents that is never trained on, where no test split is published.
        fetch: without a hub id, the command that downloads it, with {folder} for where it is looked for.
        label: the column with categories of its own, if any.
        adapt: from a row as published to one with the usual column names.
        reminder: printed whenever it is trained on.
    """

    category: str
    hub: str = ""
    files: tuple[str, ...] = ()
    heldout_files: tuple[str, ...] = ()
    heldout_share: float = 0.05
    fetch: str = ""
    label: str = ""
    adapt: Callable[[Row], Row] = dict
    reminder: str = ""


_EVALUATION = 1.0  # heldout_share of benchmarks

_MLPERF_REMINDER = (
    "mlperf-gpt-oss is the prompts of the MLPerf Inference benchmark itself: a head meant for an official MLPerf "
    "submission must not be trained on them. Their licence is not stated; ask MLCommons before you publish a head."
)

# Licences, as their publishers state them, are in docs/prompts.md.
CATALOGUE: dict[str, Entry] = {
    "sharegpt": Entry(
        "sharegpt", adapt=share_gpt,
        hub="anon8231489123/ShareGPT_Vicuna_unfiltered",
        files=("ShareGPT_V3_unfiltered_cleaned_split.json",),
    ),
    "mlperf-gpt-oss": Entry(
        "mlperf", files=("*perf_eval_ref.parquet",), heldout_share=0.25, reminder=_MLPERF_REMINDER,
        fetch="mkdir -p {folder} && bash <(curl -s https://raw.githubusercontent.com/mlcommons/r2-downloader/refs/"
        "heads/main/mlc-r2-downloader.sh) -d {folder} "
        "https://inference.mlcommons-storage.org/metadata/gpt-oss-data.uri",
    ),
    "swe-bench": Entry(
        "swe-bench", hub="princeton-nlp/SWE-bench",
        files=("data/train-*.parquet",), heldout_files=("data/test-*.parquet",),
    ),
    "mt-bench": Entry(
        "mt-bench", hub="philschmid/mt-bench", files=("*.jsonl", "*.parquet"),
        heldout_share=_EVALUATION, label="category",
    ),
    "humaneval": Entry(
        "code", adapt=human_eval, hub="openai/openai_humaneval", files=("openai_humaneval/test-*.parquet",),
        heldout_share=_EVALUATION,
    ),
    "gsm8k": Entry(
        "math", hub="openai/gsm8k",
        files=("main/train-*.parquet",), heldout_files=("main/test-*.parquet",),
    ),
    "instruct-coder": Entry(
        "code-editing", adapt=instruct_coder, hub="likaixin/InstructCoder",
        files=("train*.json*", "data/train-*.parquet"),
    ),
    "spec-bench": Entry(
        "spec-bench", files=("question.jsonl",), heldout_share=_EVALUATION, label="category",
        fetch="curl --create-dirs -L -o {folder}/question.jsonl "
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
    "creative-writing": Entry(
        "creative-writing", adapt=writing_prompts, hub="euclaise/writingprompts",
        files=("data/train-*.parquet",), heldout_files=("data/test-*.parquet",),
    ),
    "structured-output": Entry(
        "structured-output", hub="NousResearch/hermes-function-calling-v1",
        files=("json-mode-singleturn.json",), heldout_share=0.2,
    ),
    "ultrachat-200k": Entry(
        "chat", hub="HuggingFaceH4/ultrachat_200k",
        files=("data/train_sft-*.parquet",), heldout_files=("data/test_sft-*.parquet",),
    ),
    "magpie": Entry(
        "magpie", hub="Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", files=("data/train-*.parquet",),
        label="task_category",
    ),
    "nemotron-v2": Entry(
        "nemotron", hub="nvidia/Nemotron-Post-Training-Dataset-v2", label="category",
        files=("data/stem-*.parquet", "data/chat-*.parquet", "data/math-*.parquet", "data/code-*.parquet"),
    ),
    "perfect-blend": Entry(
        "perfect-blend", hub="mlabonne/open-perfectblend", files=("data/train-*.parquet",), label="source"
    ),
    "burstgpt": Entry(
        "throughput-only", adapt=burst_gpt, files=("*.csv",), heldout_share=_EVALUATION,
        fetch="curl --create-dirs -L -o {folder}/BurstGPT_1.csv "
        "https://raw.githubusercontent.com/HPMLL/BurstGPT/main/data/BurstGPT_1.csv",
    ),
    "speed-bench": Entry(
        "speed-bench", adapt=speed_bench, hub="nvidia/SPEED-Bench",
        files=("qualitative/test-*.parquet", "qualitative.jsonl"), heldout_share=_EVALUATION, label="category",
    ),
    **{
        f"speculators-{name.lower()}": Entry(
            name.lower(), hub="RedHatAI/speculator_benchmarks", files=(f"{name}.jsonl",), heldout_share=_EVALUATION
        )
        for name in (
            "HumanEval", "math_reasoning", "qa", "question", "rag", "summarization", "tool_call", "translation",
            "writing",
        )
    },
}  # fmt: skip

LOCAL = Entry("all", label="category")  # a name that is not above
