"""Two checks of a written head: its file holds the checkpoint's tensors, and vLLM accepts as much as was predicted.

The serving check compares like with like: the first validation prompts, answered by the engine at temperature 0,
against rounds replayed from the checkpoint's float32 weights over the stored responses to the same prompts (for a head
in fp8, from the values that its file holds: their cost is measured apart). In bf16 an engine may choose another token
where two were equally likely, so the counters are pooled over the responses that came out as stored, and `TOLERANCE` is
what rounding may change on those.

Shapes: R rows of one document, K draft tokens, H hidden, V target vocabulary.
"""

import logging
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data import store as state_store
from drafthead.data.packing import pack, whole
from drafthead.data.responses import loops
from drafthead.data.store import StateStore
from drafthead.drafters.base import DraftShape, frozen_copy
from drafthead.drafters.fp8 import as_served
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import Acceptance, last_answer, match_text, replay
from drafthead.drafters.vllm import check_config, read_tensors, written_tensors
from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.engine.offline import generate, import_vllm, offline_engine
from drafthead.statistics import Interval, length_difference
from drafthead.target.pieces import load_pieces

TOLERANCE = 0.05  # of the acceptance length, relative, over responses that came out as stored
LOOSE_TOLERANCE = 0.15  # over all responses, when fewer than half of the rounds are comparable
PROMPTS, TOKENS = 32, 32768  # of the serving check, at most

log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


def check_reload(directory: Path, weights: dict[str, Tensor], shape: DraftShape, dtype: str) -> None:
    """Compare the written file with the checkpoint, to the last bit.

    Args:
        directory: that holds model.safetensors.
        weights: of the checkpoint, float32.
        shape: of the trained head.
        dtype: `export.dtype` they were written in.

    Raises:
        ValueError: a tensor does not come back.
    """
    wanted = read_tensors(written_tensors(weights, shape, dtype))
    found = drafter_of(shape.head).vllm.checkpoint_tensors(load_file(directory / "model.safetensors"))
    wrong = found.keys() ^ wanted.keys() or {name for name in wanted if not torch.equal(found[name], wanted[name])}
    if wrong:
        raise ValueError(f"{directory} was damaged while it was written: {', '.join(sorted(wrong))} differ")


@dataclass(frozen=True)
class Document:
    """A validation document: its index and id in the store, what precedes the target's last turn, and that turn with
    its stop token."""

    index: int
    id: str
    prompt_ids: list[int]
    response_ids: list[int]


class ValidationDocuments:
    """T = 0 responses of the target with the states behind them: the first ones of the validation split that the engine
    has room for and that do not loop.

    Where all of them loop they are taken after all: whether an engine serves what was trained shows on them too.

    Attributes:
        chosen: the documents.
        looping: number of documents left out because the response loops, as in training and evaluation
            (data.responses).
    """

    def __init__(self, recipe: Recipe, prompts: int = PROMPTS, tokens: int = TOKENS, directory: Path | None = None):
        """At most so many prompts and tokens, prompt and response together; at least one document.

        Args:
            recipe: target, engine, head and K.
            prompts, tokens: at most.
            directory: of states over other greedy responses; None: those of the validation split.

        Raises:
            ArtifactError: there are no validation states, or none of them fits.
        """
        directory = directory or recipe.states_dir("validation")
        artifacts.require(
            directory, state_store.KIND, "python data_gen/harvest.py RECIPE (or export with --no-serve-check)"
        )
        self._store, self._num_drafts = StateStore(directory), recipe.eval.num_draft_tokens
        fitting = []
        for index in range(len(self._store)):
            ids, mask = self._store.tokens(index)
            turn = last_answer(mask)
            if 0 < turn.start < turn.stop <= recipe.engine.max_model_len - self._num_drafts - 1:
                fitting.append(Document(index, self._store.ids[index], ids[: turn.start].tolist(), ids[turn].tolist()))
        if not fitting:
            raise artifacts.ArtifactError(
                f"no response of {directory} fits engine.max_model_len {recipe.engine.max_model_len}; raise it, or "
                "export with --no-serve-check"
            )
        straight = [document for document in fitting if not loops(document.response_ids)] or fitting
        totals = list(accumulate(len(document.prompt_ids) + len(document.response_ids) for document in straight))
        self.chosen = straight[: max(1, min(prompts, bisect_right(totals, tokens)))]
        self.looping = len(fitting) - len(straight)
        self._embeddings = load_pieces(recipe.target_path, recipe.target.revision).embed_tokens.float()

    @torch.no_grad()
    def rounds(self, weights: dict[str, Tensor], shape: DraftShape) -> list[Acceptance]:
        """Drafting rounds of a head over every response, replayed in float32 as training's validation does.

        Args:
            weights: with d2t and t2d.
            shape: of the head.
        """
        model, drafter = frozen_copy(shape, weights, _CPU, torch.float32), drafter_of(shape.head)
        target_ids = DraftVocabulary(weights["d2t"], weights["t2d"]).target_ids
        found = []
        for document in self.chosen:
            window = whole(document.index, self._store.tokens(document.index)[1], drafter)
            batch = pack(self._store, [window], drafter).to(_CPU, torch.float32)
            drafts = drafter.draft(model, batch, self._embeddings, target_ids, self._num_drafts)  # (K, R)
            found.append(replay(match_text(drafts, target_ids, batch.row_ids), batch.loss_mask))
        return found


def measure_fp8_cost(documents: ValidationDocuments, weights: dict[str, Tensor], shape: DraftShape) -> dict[str, Any]:
    """What fp8 weights cost in acceptance length, on the documents of the serving check.

    Weights alone are compared: rounds replayed with the file's weights multiplied out, against those with the same
    weights in bf16, paired by prompt. That an engine rounds activations too is in the counters of the serving check.

    Returns:
        For the manifest: prompts, acceptance lengths in bf16 and fp8, and their change (tokens per round) with the
        bounds low and high of its 95 % bootstrap interval.
    """
    bf16, fp8 = (documents.rounds(as_served(weights, dtype), shape) for dtype in ("bfloat16", "fp8"))
    change = paired_difference(fp8, bf16)
    found = {"prompts": len(bf16), "bf16": pooled(bf16).length, "fp8": pooled(fp8).length}
    log.info(
        f"fp8 weights: predicted acceptance length {found['fp8']:.3f}, in bf16 {found['bf16']:.3f}; difference "
        f"{change.value:+.4f} [{change.low:+.4f}, {change.high:+.4f}] over {len(bf16)} validation prompts"
    )
    return {**found, "change": change.value, "low": change.low, "high": change.high}


def pooled(rounds: list[Acceptance]) -> Acceptance:
    """Counters of all prompts together."""
    return sum(rounds[1:], start=rounds[0])


def paired_difference(rounds: list[Acceptance], other: list[Acceptance]) -> Interval:
    """Acceptance length minus the other's, paired by prompt."""
    drafts, other_drafts = ([a.drafts for a in method] for method in (rounds, other))
    accepted, other_accepted = ([a.accepted for a in method] for method in (rounds, other))
    return length_difference(drafts, accepted, other_drafts, other_accepted)


def check_serving(
    recipe: Recipe,
    directory: Path,
    weights: dict[str, Tensor],
    shape: DraftShape,
    aux_layer_ids: tuple[int, ...],
) -> dict[str, Any]:
    """Serve the directory in vLLM and compare its acceptance with the checkpoint's prediction.

    Args:
        recipe: target, engine, export section and K.
        directory: the exported head.
        weights: of the checkpoint, float32, with d2t and t2d.
        shape: of the trained head.
        aux_layer_ids: it was trained on.

    Returns:
        For the manifest: what fp8 weights cost, if the head has them (fp8_cost), and of the check (serve_check) the
        number of prompts, of documents left out as looping, of responses that equal the stored ones (same_text) and of
        those with exactly the replayed counters (same_rounds); what was compared; the predicted and the served
        acceptance length, the engine's rounds, and the relative tolerance.

    Raises:
        ValueError: vLLM cannot be imported, reads config.json differently, or accepts more or less than predicted.
    """
    documents, cost = ValidationDocuments(recipe), {}
    source = weights
    if recipe.export.dtype == "fp8":
        source, cost = as_served(weights, "fp8"), {"fp8_cost": measure_fp8_cost(documents, weights, shape)}
    predicted = documents.rounds(source, shape)
    served = serve_documents(recipe, directory, documents.chosen, shape, aux_layer_ids)
    same = [document.response_ids == ids for document, (ids, _) in zip(documents.chosen, served, strict=True)]
    counted = [acceptance for _, acceptance in served]
    comparable = sum(rounds.drafts for rounds in compress(predicted, same))
    strict = 0 < comparable >= pooled(predicted).drafts / 2
    kept = same if strict else [True] * len(same)
    ours, theirs = (pooled(list(compress(rounds, kept))) for rounds in (predicted, counted))
    found: dict[str, Any] = {
        "prompts": len(same),
        "looping": documents.looping,
        "same_text": sum(same),
        "same_rounds": sum(p == c for p, c in compress(zip(predicted, counted, strict=True), same)),
        "compared": "answers that came out as stored" if strict else "all answers",
        "predicted": ours.length,
        "served": theirs.length,
        "rounds": theirs.drafts,
        "tolerance": TOLERANCE if strict else LOOSE_TOLERANCE,
    }
    summary = (
        f"over {sum(kept)} of {len(same)} responses ({theirs.drafts} rounds) the checkpoint predicts an acceptance "
        f"length of {ours.length:.3f}, the engine's counters give {theirs.length:.3f}; allowed is a difference of "
        f"{found['tolerance']:.0%}. {sum(same)} responses are the stored ones, {found['same_rounds']} with exactly the "
        f"predicted rounds; {documents.looping} that loop were left out"
    )
    if not abs(theirs.length - ours.length) <= found["tolerance"] * ours.length:
        raise ValueError(f"vLLM does not serve the head that was trained; nothing is exported: {summary}")
    log.info(f"served in vLLM: {summary}")
    return {**cost, "serve_check": found}


def serve_documents(
    recipe: Recipe,
    directory: Path,
    documents: list[Document],
    shape: DraftShape,
    aux_layer_ids: tuple[int, ...],
    *,
    checked: bool = True,
) -> list[tuple[list[int], Acceptance]]:
    """Answer the prompts of validation documents in vLLM with the head of a directory, at temperature 0.

    Args:
        recipe: target, engine, export section and K.
        directory: of the head.
        documents: whose prompts are answered.
        shape: of the trained head.
        aux_layer_ids: it was trained on.
        checked: refuse a head that the engine reads differently from how it was trained.

    Returns:
        Response ids and the engine's counters of every document.

    Raises:
        ValueError: vLLM cannot be imported, or reads config.json differently.
    """
    K = recipe.eval.num_draft_tokens
    sampling = import_vllm().SamplingParams
    params = [sampling(temperature=0, max_tokens=len(d.response_ids), detokenize=False) for d in documents]
    # A head of the speculators layout is started as users will: by its own directory, which names the target.
    options: dict[str, Any] = {"model": str(directory)}
    if recipe.export.format == "vllm":
        options = {"speculative_config": drafter_of(shape.head).vllm.speculative_config(directory, K)}
    with offline_engine(recipe, per_request_spec_decode_metrics="summary", **options) as llm:
        if checked:
            running = llm.llm_engine.vllm_config.speculative_config
            assert running is not None
            parsed = running.draft_model_config.hf_config.to_dict()
            check_config(parsed, shape, aux_layer_ids, recipe.engine.max_model_len, recipe.export.dtype)
        outputs: list[Any] = [output.outputs[0] for output in generate(llm, [d.prompt_ids for d in documents], params)]
    found = []
    for output in outputs:
        histogram = output.spec_decode_metrics.histogram  # [j]: rounds that accepted j drafts
        accepted = tuple(sum(histogram[k + 1 :]) for k in range(K))
        found.append((list(output.token_ids), Acceptance(sum(histogram), accepted)))
    return found
