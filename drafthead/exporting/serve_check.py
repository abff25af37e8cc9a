"""The head in vLLM against the checkpoint's prediction.

Like is compared with like: the first validation prompts, answered by the engine at temperature 0, against rounds
replayed from the checkpoint's own float32 weights over the stored answers to the same prompts (for a head in fp8, from
the values that its file holds: their cost is measured apart). In bf16 an engine may say another word where two were
equally likely, so the counters are pooled over the answers that came out as stored, and `TOLERANCE` is what rounding
may change on those.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafthead.config import Recipe
from drafthead.drafters.base import DraftShape
from drafthead.drafters.replay import Acceptance, empty_acceptance
from drafthead.engine.offline import generate, import_vllm, offline_engine
from drafthead.exporting.answers import ValidationAnswers, validation_answers
from drafthead.exporting.contract import as_served
from drafthead.exporting.replay import Answer
from drafthead.exporting.served import check_served

TOLERANCE = 0.05  # of the acceptance length, relative, over answers that came out as stored
LOOSE_TOLERANCE = 0.15  # over all answers, when fewer than half of the rounds are comparable


@dataclass(frozen=True)
class ServeCheck:
    """What the engine showed.

    Attributes:
        prompts: answered.
        looping: validation answers that go in circles and were left out, as they are in training and evaluation.
        same_text: of those, answers that equal the stored ones token for token.
        same_rounds: of those, answers whose counters equal the replayed ones, position by position.
        compared: "answers that came out as stored" or "all answers".
        predicted: acceptance length replayed from the checkpoint over the compared answers.
        served: acceptance length of the engine's counters over the same prompts.
        rounds: drafting rounds of the engine over the compared answers.
        tolerance: relative, on the acceptance length.
    """

    prompts: int
    looping: int
    same_text: int
    same_rounds: int
    compared: str
    predicted: float
    served: float
    rounds: int
    tolerance: float

    def sentence(self) -> str:
        """For the terminal."""
        return (
            f"served in vLLM: acceptance length {self.served:.3f}, predicted {self.predicted:.3f} (within "
            f"{self.tolerance:.0%}; {self.rounds} rounds over {self.compared}). Of {self.prompts} validation prompts "
            f"{self.same_text} have the stored answer, {self.same_rounds} with exactly the predicted rounds; "
            f"{self.looping} whose answer loops left out"
        )


def check_serving(
    recipe: Recipe, directory: Path, weights: dict[str, Tensor], shape: DraftShape, aux_layer_ids: tuple[int, ...]
) -> ServeCheck:
    """Serve the directory in vLLM and compare its acceptance with the checkpoint's prediction.

    Args:
        recipe: target, engine, validation states and K.
        directory: the exported head.
        weights: of the checkpoint, float32, with d2t and t2d.
        shape: of the trained head.
        aux_layer_ids: it was trained on.

    Raises:
        ArtefactError: there are no validation states to compare on.
        ValueError: vLLM cannot be imported, reads config.json differently, or accepts more or less than predicted.
    """
    answers = validation_answers(recipe, aux_layer_ids)
    source = as_served(weights, "fp8") if recipe.export.dtype == "fp8" else weights
    predicted = answers.rounds(source, shape)
    served = serve_answers(recipe, directory, answers.chosen, shape, aux_layer_ids)
    return _compare(directory, answers, predicted, served)


@dataclass(frozen=True)
class Served:
    """An engine's answer and its counters."""

    ids: list[int]
    acceptance: Acceptance


def serve_answers(
    recipe: Recipe, directory: Path, answers: list[Answer], shape: DraftShape, aux_layer_ids: tuple[int, ...]
) -> list[Served]:
    """Answer the prompts of validation answers in vLLM with the head of a directory, at temperature 0.

    Raises:
        ValueError: vLLM cannot be imported, or reads config.json differently.
    """
    K = recipe.eval.num_draft_tokens
    sampling = import_vllm().SamplingParams
    params = [sampling(temperature=0, max_tokens=len(a.answer_ids), detokenize=False) for a in answers]
    # A head of the speculators layout is started as users will: by its own directory, which names the target.
    options: dict[str, Any] = {"model": str(directory)}
    if recipe.export.format == "vllm":
        options = {"speculative_config": {"method": "eagle3", "model": str(directory), "num_speculative_tokens": K}}
    with offline_engine(recipe, per_request_spec_decode_metrics="summary", **options) as llm:
        running = llm.llm_engine.vllm_config.speculative_config
        assert running is not None
        parsed = running.draft_model_config.hf_config.to_dict()
        check_served(parsed, shape, aux_layer_ids, recipe.engine.max_model_len, recipe.export.dtype)
        outputs = generate(llm, [a.prompt_ids for a in answers], params)
    return [_counted(output.outputs[0], K) for output in outputs]


def _counted(answer: Any, K: int) -> Served:
    histogram = answer.spec_decode_metrics.histogram  # [j]: rounds that accepted j drafts
    accepted = tuple(sum(histogram[k + 1 :]) for k in range(K))
    return Served(list(answer.token_ids), Acceptance(sum(histogram), accepted))


def _compare(
    directory: Path, answers: ValidationAnswers, predicted: list[Acceptance], served: list[Served]
) -> ServeCheck:
    same = [a.answer_ids == s.ids for a, s in zip(answers.chosen, served, strict=True)]
    none = empty_acceptance(len(predicted[0].accepted_per_position))
    comparable = sum(p.drafts for p, equal in zip(predicted, same, strict=True) if equal)
    strict = 2 * comparable >= sum(p.drafts for p in predicted) and comparable > 0
    kept = same if strict else [True] * len(same)
    ours = sum((p for p, keep in zip(predicted, kept, strict=True) if keep), start=none)
    theirs = sum((s.acceptance for s, keep in zip(served, kept, strict=True) if keep), start=none)
    check = ServeCheck(
        prompts=len(same),
        looping=answers.looping,
        same_text=sum(same),
        same_rounds=sum(p == s.acceptance for p, s, ok in zip(predicted, served, same, strict=True) if ok),
        compared="answers that came out as stored" if strict else "all answers",
        predicted=ours.length,
        served=theirs.length,
        rounds=theirs.drafts,
        tolerance=TOLERANCE if strict else LOOSE_TOLERANCE,
    )
    if not abs(check.served - check.predicted) <= check.tolerance * check.predicted:
        raise ValueError(
            f"vLLM does not serve the head that was trained: over {check.compared} ({sum(kept)} of {check.prompts} "
            f"prompts, {check.rounds} rounds) the checkpoint predicts an acceptance length of {check.predicted:.3f}, "
            f"the engine's counters say {check.served:.3f}; allowed is {check.tolerance:.0%}. "
            f"Nothing was exported to {directory.parent}"
        )
    return check
