"""Rows of sources whose schema is not the usual one, as their publisher gives it, with invented content.

Each entry: the extension it is published in, two rows or more, and what the first of them should become.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd


class Published(NamedTuple):
    extension: str
    rows: list[dict[str, Any]]
    prompt: str  # the last message of the first prompt
    document: str | None = None  # None: a hash
    category: str = ""


def _chat(question: str, response: str = "A response.") -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": response}]


def _shared(question: str, response: str = "A response.") -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": response}]


def _mlperf(ids: list[int]) -> dict[str, Any]:
    return {"dataset": "pubmed", "text_input": "<|start|>user<|message|>long<|end|>", "input_tokens": ids}


PUBLISHED: dict[str, Published] = {
    "sharegpt": Published(
        ".json",
        [
            {"id": "QWJhYvA_0", "conversations": _shared("Hello?")},
            {"id": "QWJhYvA_17", "conversations": [{"from": "gpt", "value": "rest"}, *_shared("More?")]},
        ],
        "Hello?", "sharegpt:QWJhYvA", "sharegpt",
    ),
    "mlperf-gpt-oss": Published(
        ".parquet", [_mlperf([200006, 1428, 7]), _mlperf([200006, 1428, 8])], "", None, "mlperf"
    ),
    "swe-bench": Published(
        ".parquet",
        [
            {
                "repo": f"owner/project{i}", "instance_id": f"owner__project{i}-1", "base_commit": "0" * 40,
                "patch": "diff", "problem_statement": f"It breaks {i}.", "hints_text": "", "FAIL_TO_PASS": "[]",
            }
            for i in range(2)
        ],
        "It breaks 0.", "swe-bench:owner/project0", "swe-bench",
    ),
    "mt-bench": Published(
        ".jsonl",
        [
            {"question_id": 81, "category": "writing", "turns": ["Write.", "Write again."]},
            {"question_id": 82, "category": "math", "turns": ["Add.", "Add again."], "reference": ["1", "2"]},
        ],
        "Write.", "mt-bench:81", "mt-bench/writing",
    ),
    "humaneval": Published(
        ".parquet",
        [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n", "entry_point": f"f{i}"} for i in range(2)],
        "Complete this Python function.\n\ndef f0():\n", "humaneval:HumanEval/0", "code",
    ),
    "instruct-coder": Published(
        ".json",
        [
            {"instruction": "Rename x.", "input": "x = 1", "output": "y = 1"},
            {"instruction": "Say hello in C.", "input": "", "output": "..."},
        ],
        "x = 1\n\nRename x. Just output the code, do not include any explanation.", None, "code-editing",
    ),
    "spec-bench": Published(
        ".jsonl",
        [
            {"question_id": 241, "category": "translation", "turns": ["Translate."]},
            {"question_id": 321, "category": "rag", "turns": ["Look up."]},
        ],
        "Translate.", "spec-bench:241", "spec-bench/translation",
    ),
    "creative-writing": Published(
        ".parquet",
        [{"prompt": "[ WP ] A door opens .", "story": "..."}, {"prompt": "[ WP ] It rains .", "story": "..."}],
        "Write a short story for this prompt.\n\nA door opens .", None, "creative-writing",
    ),
    "nemotron-v2": Published(
        ".parquet",
        [
            {
                "uuid": f"u{i}", "license": "cc-by-4.0", "category": "math", "reasoning": "on",
                "messages": [{"role": "system", "content": ""}, *_chat(f"Prove {i}.")],
            }
            for i in range(2)
        ],
        "Prove 0.", "nemotron-v2:u0", "nemotron/math",
    ),
    "burstgpt": Published(
        ".csv",
        [{"Timestamp": 5 + i, "Model": "ChatGPT", "Request tokens": 4, "Response tokens": 18} for i in range(2)],
        "", None, "throughput-only",
    ),
    "speed-bench": Published(
        ".parquet",
        [
            {"question_id": f"{i:032}", "category": "coding", "sub_category": "", "turns": [f"Sort {i}.", "Faster."]}
            for i in range(2)
        ],
        "Sort 0.", f"speed-bench:{0:032}", "speed-bench/coding",
    ),
    **{
        f"speculators-{name}": Published(".jsonl", [{"prompt": f"Do {i}."} for i in range(2)], "Do 0.", None, name)
        for name in (
            "humaneval", "math_reasoning", "qa", "question", "rag", "summarization", "tool_call", "translation",
            "writing",
        )
    },
}  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """In the form that the extension says: .parquet, .csv, .json, or lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
