"""Checks of a written head: vLLM accepts as much as was predicted, and its files are those of the checkpoint.

Like is compared with like: the first validation prompts, answered by the engine at temperature 0, against rounds
replayed from the checkpoint's float32 weights over the stored responses to the same prompts. In bf16 an engine may
choose another token where two were equally likely, so the counters are pooled over the responses that came out as
stored, and `TOLERANCE` is what rounding may change on those.

Shapes: R rows of one document, K draft tokens, H hidden, V target vocabulary.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable
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
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import Acceptance, empty_acceptance, last_response, match_text, replay
from drafthead.drafters.trained import Checkpoint
from drafthead.drafters.vllm import check_config
from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.engine.generate import Engine, GenerationRequest
from drafthead.engine.offline import offline_engine
from drafthead.statistics import few
from drafthead.target.pieces import compute_dtype, load_pieces
from drafthead.target.spec import recipe_spec, target_names

TOLERANCE = 0.05  # of the acceptance length, relative, over responses that came out as stored
LOOSE_TOLERANCE = 0.15  # over all responses, when fewer than half of the rounds are comparable
PROMPTS, TOKENS = 32, 32768  # of the serving check, at most

log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Document:
    """A validation document: its index and id in the store, what precedes the target's last turn, and that turn with
    its stop token."""

    index: int
    id: str
    prompt_ids: list[int]
    response_ids: list[int]


def check_serving(recipe: Recipe, directory: Path, source: Checkpoint, shape: DraftShape) -> dict[str, Any]:
    """Serve the directory in vLLM and compare its acceptance with the checkpoint's prediction.

    Args:
        recipe: recipe; its target, engine and export sections and K are read.
        directory: the exported head.
        source: checkpoint that the head comes from.
        shape: shape of the trained head.

    Returns:
        For the manifest: the number of prompts, of documents left out as looping, of responses that equal the stored
        ones (same_text) and of those with exactly the replayed counters (same_rounds); what was compared; the predicted
        and the served acceptance length, the engine's rounds, the tokens of a response at most, and the relative
        tolerance.

    Raises:
        ArtifactError: there are no validation states, or none of them fits the engine.
        ValueError: vLLM cannot be imported, reads config.json differently, or accepts more or less than predicted.
    """

    def check(config: dict[str, Any]) -> None:
        check_config(config, shape, source.aux_layer_ids, recipe.engine.max_model_len)

    need = "python data_gen/harvest.py RECIPE (or export with --no-serve-check)"
    artifacts.require(recipe.states_dir("validation"), state_store.KIND, need)
    store = StateStore(recipe.states_dir("validation"))
    documents, looping = choose_documents(store, recipe)
    predicted = replayed_rounds(recipe, store, documents, source.weights(), shape)
    served = serve_documents(recipe, directory, documents, check)
    same = [document.response_ids == ids for document, (ids, _) in zip(documents, served, strict=True)]
    counted, none = [acceptance for _, acceptance in served], empty_acceptance(recipe.eval.num_draft_tokens)
    comparable = sum(rounds.drafts for rounds in compress(predicted, same))
    strict = 0 < comparable >= sum(rounds.drafts for rounds in predicted) / 2
    compared = same if strict else [True] * len(same)
    ours, theirs = (sum(compress(rounds, compared), start=none) for rounds in (predicted, counted))
    result: dict[str, Any] = {
        "prompts": len(same),
        "looping": looping,
        "same_text": sum(same),
        "same_rounds": sum(p == c for p, c in compress(zip(predicted, counted, strict=True), same)),
        "compared": "responses that came out as stored" if strict else "all responses",
        "predicted": ours.length,
        "served": theirs.length,
        "rounds": theirs.drafts,
        "tokens": recipe.eval.max_tokens,
        "tolerance": TOLERANCE if strict else LOOSE_TOLERANCE,
    }
    summary = (
        f"over {sum(compared)} of {len(same)} responses ({theirs.drafts} rounds) the checkpoint predicts an acceptance "
        f"length of {ours.length:.3f}, the engine's counters give {theirs.length:.3f}{few(sum(compared))}; allowed is "
        f"a difference of {result['tolerance']:.0%}. {sum(same)} responses are the stored ones, "
        f"{result['same_rounds']} with exactly the predicted rounds; {looping} that loop were left out"
    )
    if not abs(theirs.length - ours.length) <= result["tolerance"] * ours.length:
        raise ValueError(f"vLLM does not serve the head that was trained; nothing is exported: {summary}")
    log.info(f"served in vLLM: {summary}")
    return result


def choose_documents(
    store: StateStore, recipe: Recipe, prompts: int = PROMPTS, tokens: int = TOKENS
) -> tuple[list[Document], int]:
    """T = 0 responses of the target: the first ones of the validation split that the engine has room for and that do
    not loop, at least one and at most so many prompts and tokens; and how many loop, left out as in training and
    evaluation.

    Where all of them loop they are taken after all: whether an engine serves what was trained shows on them too.
    """
    fitting = []
    for index in range(len(store)):
        ids, mask = store.tokens(index)
        turn = last_response(mask, recipe.eval.max_tokens)
        if 0 < turn.start < turn.stop <= recipe.engine.max_model_len - recipe.eval.num_draft_tokens - 1:
            fitting.append(Document(index, store.ids[index], ids[: turn.start].tolist(), ids[turn].tolist()))
    if not fitting:
        raise artifacts.ArtifactError(
            f"no validation response fits engine.max_model_len {recipe.engine.max_model_len}; raise it, or export with "
            "--no-serve-check"
        )
    straight = [document for document in fitting if not loops(document.response_ids)] or fitting
    totals = list(accumulate(len(document.prompt_ids) + len(document.response_ids) for document in straight))
    return straight[: max(1, min(prompts, bisect_right(totals, tokens)))], len(fitting) - len(straight)


@torch.no_grad()
def replayed_rounds(
    recipe: Recipe, store: StateStore, documents: list[Document], weights: dict[str, Tensor], shape: DraftShape
) -> list[Acceptance]:
    """Drafting rounds of a head over every response, replayed in float32 as training's validation does."""
    model, drafter = frozen_copy(shape, weights, _CPU, torch.float32), drafter_of(shape.head)
    embeddings = load_pieces(recipe.target_path, recipe.target.revision).embed_tokens.float()
    target_ids = DraftVocabulary(weights["d2t"], weights["t2d"]).target_ids
    rounds = []
    for document in documents:
        window = whole(document.index, store.tokens(document.index)[1], drafter)
        batch = pack(store, [window], drafter).to(_CPU, torch.float32)
        drafts = model.draft(batch, embeddings, recipe.eval.num_draft_tokens)  # (K, R)
        rounds.append(replay(match_text(drafts, target_ids, batch.row_ids), batch.loss_mask, recipe.eval.max_tokens))
    return rounds


def serve_documents(
    recipe: Recipe, directory: Path, documents: list[Document], check: Callable[[dict[str, Any]], None] | None = None
) -> list[tuple[list[int], Acceptance]]:
    """Answer the prompts of validation documents in vLLM with the head of a directory.

    Args:
        recipe: recipe; its target, engine and export sections and K are read.
        directory: directory of the head.
        documents: documents whose prompts are answered.
        check: called with config.json as the engine reads it; raises where it is wrong.

    Returns:
        Response ids and the engine's counters of every document.

    Raises:
        ValueError: vLLM cannot be imported, or the check fails.
    """
    K = recipe.eval.num_draft_tokens
    requests = [GenerationRequest(d.prompt_ids, len(d.response_ids), 0.0, None) for d in documents]
    # A head of the speculators layout is started as users will: by its own directory, which names the target.
    options: dict[str, Any] = {"model": str(directory)}
    if recipe.export.format == "vllm":
        options = {"speculative_config": drafter_of(recipe.head).vllm.speculative_config(directory, K)}
    with offline_engine(recipe, **options, per_request_spec_decode_metrics="summary") as llm:
        if check is not None:
            running = llm.llm_engine.vllm_config.speculative_config
            assert running is not None
            check(running.draft_model_config.hf_config.to_dict())
        generations = Engine(llm).generate(requests)
    answers = []
    for generation in generations:
        histogram = generation.counters.histogram  # [j]: rounds that accepted j drafts
        accepted = tuple(sum(histogram[k + 1 :]) for k in range(K))
        answers.append((generation.token_ids, Acceptance(sum(histogram), accepted)))
    return answers


# ---- Against the checkpoint: what `eval/explain.py` looks at first ----


def head_differences(recipe: Recipe, directory: Path, source: Checkpoint, shape: DraftShape) -> list[str]:
    """How the head that is served differs from the one that was trained; a line for each kind of difference.

    Args:
        recipe: recipe that the head is served by.
        directory: directory of the served head.
        source: checkpoint that the head should come from.
        shape: shape of the trained head.
    """
    spec = recipe_spec(recipe)
    differences = source.differences(recipe, spec)
    problems = [f"the recipe describes another head than was trained:\n{differences}"] if differences else []
    if (directory / artifacts.MANIFEST).exists():
        made_for, target = target_names(artifacts.read_manifest(directory)["identity"]["target"], recipe, spec)
        if made_for != target:
            problems.append(f"another target: the head was made for {made_for}, served is {target}")
    try:
        config = artifacts.read_json(directory / "config.json")
        check_config(config, shape, source.aux_layer_ids, recipe.engine.max_model_len)
    except KeyError as error:
        problems.append(f"config.json has no {error}")
    except ValueError as error:
        problems.append(str(error))
    dtype = str(compute_dtype(spec, recipe.target.dtype)).removeprefix("torch.")
    files = drafter_of(recipe.head).vllm
    trained = files.checkpoint_tensors(files.exported_tensors(source.weights(), shape, dtype))  # in the file's type
    served = files.checkpoint_tensors(load_file(directory / "model.safetensors"))
    problems += [
        f"model.safetensors has no {name}, which was trained" for name in sorted(trained.keys() - served.keys())
    ]
    problems += [
        f"model.safetensors has {name}, which was not trained" for name in sorted(served.keys() - trained.keys())
    ]
    both = sorted(served.keys() & trained.keys())
    if "t2d" in both and served["t2d"].shape == trained["t2d"].shape:
        untrained = int((served["t2d"].bool() & ~trained["t2d"].bool()).sum())
        if untrained:
            problems.append(
                f"another draft vocabulary: {untrained} of {int(served['t2d'].sum())} tokens were not trained"
            )
    if changed := [name for name in both if not torch.equal(served[name], trained[name])]:
        counted = f"{len(changed)} of {len(both)} tensors"
        problems.append(f"other values than in the checkpoint: {', '.join(changed)} ({counted})")
    return problems
