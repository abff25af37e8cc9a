"""Acceptance in process: how many draft tokens the target keeps, prompt by prompt, and whether text changes.

Each arm is one engine over the same prompts at temperature 0. The baseline answers twice, the second time
in reverse order with an empty cache: in bf16 another batch composition rounds differently, and what differs
between those two is the floor under every statement about losslessness. In-process engines give exact
counters per request but say nothing about speed; that is `drafthead.evaluation.serving`'s part.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from drafthead.config import Recipe
from drafthead.core.statistics import repeated_ngram_share
from drafthead.evaluation.workload import (
    BASELINE,
    BASELINE_AGAIN,
    EvalPrompt,
    Workload,
    identity,
    load_workload,
    speculative_config,
)
from drafthead.progress import progress_bar
from drafthead.provenance import atomic_path, begin, finish
from drafthead.serving.engine import generate, import_vllm, offline_engine

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

KIND = "acceptance"
LOOPING_SHARE = 0.1  # of an answer's 8-grams: above it the answer repeats itself


def measure_acceptance(recipe: Recipe) -> Path:
    """Measure every arm that is not on disk yet; returns the artefact's directory.

    Raises:
        ArtefactError: prompts or head are missing, or the directory holds another measurement.
        ValueError: held-out prompts were trained on, or none fits.
    """
    directory = acceptance_dir(recipe)
    workload = load_workload(recipe)
    arms = (BASELINE, *recipe.eval.methods)
    if begin(directory, KIND, identity(recipe, workload, arms)):
        return directory
    missing = [arm for arm in arms if not _arm_path(directory, arm).exists()]
    # n-gram drafting imports numba, after which vLLM 0.32 cannot start another engine in this process.
    missing.sort(key=lambda arm: arm == "ngram")
    generations = sum(1 + (arm == BASELINE) for arm in arms) * len(workload.prompts)
    done = generations - sum(1 + (arm == BASELINE) for arm in missing) * len(workload.prompts)
    with progress_bar(generations, "measuring acceptance", "answer", initial=done) as bar:
        for arm in missing:
            rows = _run_arm(recipe, arm, workload.prompts, bar)
            with atomic_path(_arm_path(directory, arm)) as temporary:
                pd.DataFrame(rows).to_parquet(temporary, index=False)
    finish(directory, _counts(workload, arms))
    return directory


def acceptance_dir(recipe: Recipe) -> Path:
    """Where the measurement lies; one at float32, for exact losslessness, has a folder of its own."""
    return recipe.results_dir / (KIND if recipe.target.dtype != "float32" else f"{KIND}-float32")


def read_acceptance(directory: Path) -> pd.DataFrame:
    """One row per request: arm, prompt_id, category, output_ids, output_sha256, num_tokens, drafts, proposed,
    accepted, accepted_at (per position), finish_reason, repeated (share of 8-grams)."""
    return pd.concat([pd.read_parquet(path) for path in sorted(directory.glob("arm-*.parquet"))], ignore_index=True)


def _arm_path(directory: Path, arm: str) -> Path:
    return directory / f"arm-{arm}.parquet"


def _counts(workload: Workload, arms: tuple[str, ...]) -> dict[str, Any]:
    return {
        "prompts": len(workload.prompts),
        "too_long": workload.too_long,
        "unrenderable": workload.unrenderable,
        "arms": len(arms),
    }


def _run_arm(recipe: Recipe, arm: str, prompts: list[EvalPrompt], bar: Any) -> list[dict[str, Any]]:
    speculative = speculative_config(recipe, arm)
    # vLLM refuses the option without speculation.
    options: dict[str, Any] = {"per_request_spec_decode_metrics": "summary"} if speculative else {}
    with offline_engine(recipe, speculative=speculative, **options) as llm:
        rows = _answer(llm, recipe, arm, prompts, bar)
        if arm == BASELINE:
            llm.reset_prefix_cache()
            rows += _answer(llm, recipe, BASELINE_AGAIN, prompts[::-1], bar)
    return rows


def _answer(llm: "LLM", recipe: Recipe, arm: str, prompts: list[EvalPrompt], bar: Any) -> list[dict[str, Any]]:
    params = import_vllm().SamplingParams(temperature=0, max_tokens=recipe.eval.max_tokens, detokenize=False)
    outputs = generate(llm, [p.prompt_ids for p in prompts], params, bar)
    return [_row(arm, p, output, recipe.eval.num_draft_tokens) for p, output in zip(prompts, outputs, strict=True)]


def _row(arm: str, prompt: EvalPrompt, output: "RequestOutput", K: int) -> dict[str, Any]:
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    counters = answer.spec_decode_metrics
    histogram = counters.histogram if counters else [0] * (K + 1)  # [j]: verifications that accepted j drafts
    return {
        "arm": arm,
        "prompt_id": prompt.id,
        "category": prompt.category,
        "prompt_tokens": len(prompt.prompt_ids),
        "output_ids": ids,
        "output_sha256": hashlib.sha256(repr(ids).encode()).hexdigest(),
        "num_tokens": len(ids),
        "drafts": sum(histogram),
        "proposed": counters.num_draft_tokens if counters else 0,
        "accepted": sum(j * count for j, count in enumerate(histogram)),
        "accepted_at": [sum(histogram[k + 1 :]) for k in range(K)],  # position k was kept: at least k+1 accepted
        "finish_reason": answer.finish_reason,
        "repeated": repeated_ngram_share(ids),
    }
