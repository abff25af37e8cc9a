"""Two checks of a written head: the training module's logits from its file, and the predicted acceptance from vLLM.

The serving check compares like with like: the first validation prompts, answered by the engine at temperature 0,
against rounds replayed from the checkpoint's float32 weights over the stored responses to the same prompts (for a head
in fp8, from the values that its file holds: their cost is measured apart). In bf16 an engine may choose another token
where two were equally likely, so the counters are pooled over the responses that came out as stored, and `TOLERANCE` is
what rounding may change on those.

Shapes: R rows of one document, K draft tokens, H hidden, D draft vocabulary, V target vocabulary.
"""

import logging
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
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
from drafthead.drafters.base import DraftModule, DraftShape, frozen_copy
from drafthead.drafters.batch import PackedBatch, tail_layout
from drafthead.drafters.fp8 import as_served
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import Acceptance, last_answer, match_text, replay
from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.engine.offline import generate, import_vllm, offline_engine
from drafthead.statistics import Interval, length_difference
from drafthead.target.pieces import load_pieces

TOLERANCE = 0.05  # of the acceptance length, relative, over responses that came out as stored
LOOSE_TOLERANCE = 0.15  # over all responses, when fewer than half of the rounds are comparable
PROMPTS, TOKENS = 32, 32768  # of the serving check, at most

log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


@torch.no_grad()
def check_reload(directory: Path, weights: dict[str, Tensor], shape: DraftShape, dtype: str) -> float:
    """Compare the written file with the training module over two draft steps of random states, to the last bit.

    Args:
        directory: that holds model.safetensors.
        weights: of the checkpoint, float32.
        shape: of the trained head.
        dtype: `export.dtype` they were written in.

    Returns:
        Share of positions whose most likely draft token is that of the float32 weights: what the cast costs.

    Raises:
        ValueError: the file does not give the training module's logits.
    """
    written = drafter_of(shape.head).vllm.checkpoint_tensors(load_file(directory / "model.safetensors"))
    served, cast, trained = (
        _probe_logits(frozen_copy(shape, tensors, _CPU, torch.float32))
        for tensors in (written, as_served(weights, dtype), weights)
    )
    if not torch.equal(served, cast):
        raise ValueError(
            f"{directory} does not give the training module's logits: largest difference "
            f"{float((served - cast).abs().max()):.3g}; the written file is damaged or the export is wrong"
        )
    return float((served.argmax(-1) == trained.argmax(-1)).float().mean())


def _probe_logits(model: DraftModule, num_positions: int = 2, length: int = 16) -> Tensor:
    """(M, D) logits of the rows of K draft positions over T random states, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    size, positions = model.shape.hidden_size, torch.arange(length)
    num_positions = min(num_positions, model.shape.head.num_positions)
    aux = torch.randn(length, model.shape.num_aux_layers * size, generator=generator)
    embeddings = torch.randn(length, size, generator=generator)
    nothing = torch.zeros(length, size)
    batch = PackedBatch(
        ids=("probe",), layout=tail_layout([length], [0]), input_ids=positions, positions=positions, aux=aux,
        loss_mask=torch.ones(length, dtype=torch.bool), scored=torch.ones(num_positions, length, dtype=torch.bool),
        of_row=positions, last_hidden=nothing, argmax=positions, lse=nothing[:, 0],
    )  # fmt: skip
    return model.lm_head(model.head_rows(batch, embeddings, num_positions).states)


@dataclass(frozen=True)
class Document:
    """A validation document.

    Attributes:
        index: in the store.
        prompt_ids: everything before the target's last turn.
        response_ids: that turn, the stop token included.
    """

    index: int
    prompt_ids: list[int]
    response_ids: list[int]


@dataclass(frozen=True)
class ValidationDocuments:
    """T = 0 responses of the target with the states behind them.

    Attributes:
        store: that holds them.
        chosen: which of its documents.
        embeddings: (V, H) of the target.
        num_drafts: K to be served.
        looping: documents left out because the response loops, as in training and evaluation (data.responses).
    """

    store: StateStore
    chosen: list[Document]
    embeddings: Tensor
    num_drafts: int
    looping: int

    def rounds(self, weights: dict[str, Tensor], shape: DraftShape) -> list[Acceptance]:
        """Drafting rounds of a head over every response, replayed in float32.

        Args:
            weights: with d2t and t2d.
            shape: of the head.
        """
        model = frozen_copy(shape, weights, _CPU, torch.float32)
        target_ids = DraftVocabulary(weights["d2t"], weights["t2d"]).target_ids
        return [self._predicted_rounds(model, target_ids, document.index) for document in self.chosen]

    @torch.no_grad()
    def _predicted_rounds(self, model: DraftModule, target_ids: Tensor, index: int) -> Acceptance:
        """The rounds of one document, by the definition of training's validation."""
        mask, drafter = self.store.tokens(index)[1], drafter_of(model.shape.head)
        batch = pack(self.store, [whole(index, mask, drafter)], drafter).to(_CPU, torch.float32)
        drafts = drafter.draft(model, batch, self.embeddings.float(), self.num_drafts)  # (K, R)
        return replay(match_text(drafts, target_ids, batch.row_ids), batch.loss_mask)


def validation_documents(
    recipe: Recipe, aux_layer_ids: tuple[int, ...], prompts: int = PROMPTS, tokens: int = TOKENS
) -> ValidationDocuments:
    """The first documents of the validation split that the engine has room for and whose response does not loop.

    Where all of them loop they are taken after all: whether an engine serves what was trained shows on them too.

    Args:
        recipe: target, engine, validation states and K.
        aux_layer_ids: that the head was trained on.
        prompts, tokens: at most so many, prompt and response together; at least one document.

    Raises:
        ArtifactError: there are no validation states, they hold other aux layers, or none of them fits.
    """
    directory = recipe.states_dir("validation")
    command = "python data_gen/harvest.py RECIPE (or export with --no-serve-check)"
    artifacts.require(directory, state_store.KIND, command)
    store = StateStore(directory)
    if tuple(store.aux_layer_ids) != aux_layer_ids:
        raise artifacts.ArtifactError(
            f"{directory} holds layers {store.aux_layer_ids}, the head was trained on {list(aux_layer_ids)}; harvest "
            "again under another name (name=...), or export with --no-serve-check"
        )
    K = recipe.eval.num_draft_tokens
    fitting = []
    for index in range(len(store)):
        ids, mask = store.tokens(index)
        turn = last_answer(mask)
        document = Document(index, ids[: turn.start].tolist(), ids[turn].tolist())
        if document.prompt_ids and document.response_ids and turn.stop <= recipe.engine.max_model_len - K - 1:
            fitting.append(document)
    if not fitting:
        raise artifacts.ArtifactError(
            f"no response of {directory} fits engine.max_model_len {recipe.engine.max_model_len}; raise it, or export "
            "with --no-serve-check"
        )
    straight = [document for document in fitting if not loops(document.response_ids)] or fitting
    totals = list(accumulate(len(document.prompt_ids) + len(document.response_ids) for document in straight))
    chosen = straight[: max(1, min(prompts, bisect_right(totals, tokens)))]
    embeddings = load_pieces(recipe.target_path, recipe.target.revision).embed_tokens
    return ValidationDocuments(store, chosen, embeddings, K, len(fitting) - len(straight))


def measure_fp8_cost(documents: ValidationDocuments, weights: dict[str, Tensor], shape: DraftShape) -> dict[str, Any]:
    """What fp8 weights cost in acceptance length, on the documents of the serving check.

    Weights alone are compared: rounds replayed with the file's weights multiplied out, against those with the same
    weights in bf16, paired by prompt. That an engine rounds activations too is in the counters of the serving check.

    Args:
        documents: of the validation split.
        weights: of the checkpoint, float32, with d2t and t2d.
        shape: of the trained head.

    Returns:
        For the manifest: prompts, acceptance lengths in bf16 and fp8, and their change (tokens per round) with the
        bounds low and high of its 95 % bootstrap interval.
    """
    bf16, fp8 = (documents.rounds(as_served(weights, dtype), shape) for dtype in ("bfloat16", "fp8"))
    change = paired_difference(fp8, bf16)
    before, after = pooled(bf16).length, pooled(fp8).length
    log.info(
        f"fp8 weights: predicted acceptance length {after:.3f}, in bf16 {before:.3f}; difference {change.value:+.4f} "
        f"[{change.low:+.4f}, {change.high:+.4f}] over {len(bf16)} validation prompts"
    )
    return {
        "prompts": len(bf16), "bf16": before, "fp8": after, "change": change.value, "low": change.low,
        "high": change.high,
    }  # fmt: skip


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
    documents: ValidationDocuments,
    weights: dict[str, Tensor],
    shape: DraftShape,
    aux_layer_ids: tuple[int, ...],
) -> dict[str, Any]:
    """Serve the directory in vLLM and compare its acceptance with the checkpoint's prediction.

    Args:
        recipe: target, engine, export section and K.
        directory: the exported head.
        documents: of the validation split.
        weights: of the checkpoint, float32, with d2t and t2d.
        shape: of the trained head.
        aux_layer_ids: it was trained on.

    Returns:
        For the manifest: the number of prompts, of documents left out as looping, of responses that equal the stored
        ones (same_text) and of those with exactly the replayed counters (same_rounds); what was compared; the predicted
        and the served acceptance length, the engine's rounds, and the relative tolerance.

    Raises:
        ValueError: vLLM cannot be imported, reads config.json differently, or accepts more or less than predicted.
    """
    source = as_served(weights, "fp8") if recipe.export.dtype == "fp8" else weights
    predicted = documents.rounds(source, shape)
    served = serve_documents(recipe, directory, documents.chosen, shape, aux_layer_ids)
    same = [document.response_ids == s.ids for document, s in zip(documents.chosen, served, strict=True)]
    comparable = sum(p.drafts for p, equal in zip(predicted, same, strict=True) if equal)
    strict = 2 * comparable >= sum(p.drafts for p in predicted) and comparable > 0
    kept = same if strict else [True] * len(same)
    ours = pooled([p for p, keep in zip(predicted, kept, strict=True) if keep])
    theirs = pooled([s.acceptance for s, keep in zip(served, kept, strict=True) if keep])
    found: dict[str, Any] = {
        "prompts": len(same),
        "looping": documents.looping,
        "same_text": sum(same),
        "same_rounds": sum(p == s.acceptance for p, s, ok in zip(predicted, served, same, strict=True) if ok),
        "compared": "answers that came out as stored" if strict else "all answers",
        "predicted": ours.length,
        "served": theirs.length,
        "rounds": theirs.drafts,
        "tolerance": TOLERANCE if strict else LOOSE_TOLERANCE,
    }
    if not abs(theirs.length - ours.length) <= found["tolerance"] * ours.length:
        raise ValueError(
            f"vLLM does not serve the head that was trained: over {sum(kept)} of {len(same)} responses "
            f"({theirs.drafts} rounds) the checkpoint predicts an acceptance length of {ours.length:.3f}, the engine's "
            f"counters give {theirs.length:.3f}; allowed is {found['tolerance']:.0%}. Nothing was exported to "
            f"{directory.parent}"
        )
    log.info(
        f"served in vLLM: acceptance length {theirs.length:.3f}, predicted {ours.length:.3f} (within "
        f"{found['tolerance']:.0%}; {theirs.drafts} rounds over {sum(kept)} responses). Of {len(same)} validation "
        f"prompts {sum(same)} have the stored response, {found['same_rounds']} with exactly the predicted rounds; "
        f"{documents.looping} with a looping response left out"
    )
    return found


@dataclass(frozen=True)
class Served:
    """An engine's response and its counters."""

    ids: list[int]
    acceptance: Acceptance


def serve_documents(
    recipe: Recipe, directory: Path, documents: list[Document], shape: DraftShape, aux_layer_ids: tuple[int, ...]
) -> list[Served]:
    """Answer the prompts of validation documents in vLLM with the head of a directory, at temperature 0.

    Raises:
        ValueError: vLLM cannot be imported, or reads config.json differently.
    """
    K, files = recipe.eval.num_draft_tokens, drafter_of(shape.head).vllm
    sampling = import_vllm().SamplingParams
    params = [sampling(temperature=0, max_tokens=len(d.response_ids), detokenize=False) for d in documents]
    # A head of the speculators layout is started as users will: by its own directory, which names the target.
    options: dict[str, Any] = {"model": str(directory)}
    if recipe.export.format == "vllm":
        options = {"speculative_config": files.speculative_config(directory, K)}
    with offline_engine(recipe, per_request_spec_decode_metrics="summary", **options) as llm:
        running = llm.llm_engine.vllm_config.speculative_config
        assert running is not None
        parsed = running.draft_model_config.hf_config.to_dict()
        files.check_config(parsed, shape, aux_layer_ids, recipe.engine.max_model_len, recipe.export.dtype)
        outputs: list[Any] = [output.outputs[0] for output in generate(llm, [d.prompt_ids for d in documents], params)]
    found = []
    for output in outputs:
        histogram = output.spec_decode_metrics.histogram  # [j]: rounds that accepted j drafts
        accepted = tuple(sum(histogram[k + 1 :]) for k in range(K))
        found.append(Served(list(output.token_ids), Acceptance(sum(histogram), accepted)))
    return found
