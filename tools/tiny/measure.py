"""Measure whether the target's greedy answers end by themselves and do not repeat, served by vLLM.

Gives up: any judgement of content; an answer can be good here and wrong about the function.
Alternative: `transformers.generate`, slower by far and not the engine that heads are measured with.
"""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.data.responses import LOOP_LIMIT, repeated_share

MAX_TOKENS = 256
REQUIRED_SHARE = 0.80


@dataclass(frozen=True)
class Answer:
    """One greedy answer: its workload, its token ids, and whether it stopped on its own."""

    category: str
    token_ids: list[int]
    ended: bool

    @property
    def is_good(self) -> bool:
        """Ended by itself, with under a tenth of its 8-grams seen earlier in the answer."""
        return self.ended and repeated_share(self.token_ids) < LOOP_LIMIT


def generate(target: Path, rows: list[dict[str, Any]]) -> list[Answer]:
    """Answer every row's messages greedily with vLLM, at medium effort."""
    if not rows:
        raise ValueError("no prompts to measure with: run with --prompts-only first")
    # Read by vLLM at import time; the default reserves far more than this model can use.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise RuntimeError("measuring needs vLLM: install the gpu or cpu extra, or pass --skip-measure") from error
    llm = LLM(str(target), dtype="bfloat16", enforce_eager=True, max_model_len=1024)
    outputs = llm.chat(
        [row["messages"] for row in rows],
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, skip_special_tokens=False),
        chat_template_kwargs={"reasoning_effort": "medium"},
        use_tqdm=False,
    )
    return [
        Answer(row["category"], list(out.outputs[0].token_ids), out.outputs[0].finish_reason == "stop")
        for row, out in zip(rows, outputs, strict=True)
    ]


def report(answers: list[Answer]) -> dict[str, dict[str, float]]:
    """Per workload and for all: share of good answers, share that ended, and length quantiles."""
    groups: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.category].append(answer)
        groups["all"].append(answer)
    return {name: _summary(members) for name, members in sorted(groups.items())}


def check(result: dict[str, dict[str, float]]) -> None:
    """Refuse a target whose answers loop: speculative decoding would look better than it is."""
    share = result["all"]["good"]
    if share < REQUIRED_SHARE:
        raise ValueError(f"only {share:.0%} of the answers are good, {REQUIRED_SHARE:.0%} needed: raise --steps")


def _summary(answers: list[Answer]) -> dict[str, float]:
    lengths = sorted(len(answer.token_ids) for answer in answers)
    return {
        "answers": len(answers),
        "good": sum(answer.is_good for answer in answers) / len(answers),
        "ended": sum(answer.ended for answer in answers) / len(answers),
        "tokens_p10": lengths[len(lengths) // 10],
        "tokens_p50": lengths[len(lengths) // 2],
        "tokens_p90": lengths[len(lengths) * 9 // 10],
    }
