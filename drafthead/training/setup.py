"""What a run starts from: verified inputs, the draft vocabulary, the model and the frozen target."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafthead import provenance
from drafthead.config import Recipe
from drafthead.data.store import States
from drafthead.data.windows import Window, cut
from drafthead.drafters.eagle3.model import DraftModel, DraftShape
from drafthead.drafters.vocabulary import DraftVocabulary, choose_vocabulary, size_for_coverage
from drafthead.target.pieces import (
    TargetPieces,
    TargetSpec,
    check_aux_layer_ids,
    load_target_spec,
    target_identity,
    target_names,
)
from drafthead.target.tokenizer import special_tokens
from drafthead.training.objective import FrozenTarget
from drafthead.training.start import Start, find_start
from drafthead.training.states import open_states


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run.

    Attributes:
        spec: the target's shape.
        train: states of the training split.
        validation: states of the validation split.
        identity: what the run is made from, for its manifest.
        start: weights that it begins with; None for a head made from its target.
    """

    spec: TargetSpec
    train: States
    validation: States
    identity: dict[str, Any]
    start: Start | None


def open_inputs(recipe: Recipe) -> Inputs:
    """Open both stores and check that they fit the recipe.

    Raises:
        ArtefactError: a store is missing, unfinished, or was harvested from another target or other aux layers; or
            `train.init_from` is no checkpoint.
        ValueError: an aux layer id lies beyond the target, or `train.init_from` holds another head.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    start = find_start(recipe, spec)
    references, stores = {}, {}
    for split in ("train", "validation"):
        directory = recipe.states_dir(split)
        opened = open_states(recipe, split)
        _check_store(opened.identity, recipe, spec, directory)
        references[split], stores[split] = opened.reference, opened.states
    identity = {
        "states": references,
        "target": target_identity(recipe, spec),
        "aux_layer_ids": list(recipe.target.aux_layer_ids),
        "head": recipe.head.model_dump(mode="json"),
        "train": recipe.train.model_dump(mode="json"),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        **(start.identity if start else {}),
    }
    return Inputs(spec, stores["train"], stores["validation"], identity, start)


def _check_store(identity: dict, recipe: Recipe, spec: TargetSpec, directory: Path) -> None:
    found_target, target = target_names(identity["target"], recipe, spec)
    wanted = {
        "target": target,
        "target.aux_layer_ids": list(recipe.target.aux_layer_ids),
        "states.format": recipe.states.format,
    }
    found = {
        "target": found_target,
        "target.aux_layer_ids": identity["aux_layer_ids"],
        "states.format": identity.get("format"),
    }
    if found != wanted:
        raise provenance.ArtefactError(
            f"{directory} does not fit the recipe:\n{provenance.describe_difference(found, wanted)}\n"
            f"harvest again under another name (name=...), or restore the recipe's target and states sections"
        )


@dataclass(frozen=True)
class Survey:
    """What one pass over the masks and tokens of the training split finds.

    Attributes:
        generated: (V,) how often the target generated each token.
        seen: (V,) how often each token occurs at all.
        by_category: category -> (V,) as `generated`, for the documents whose category is known.
        windows: what is trained on.
        silent: documents in which nothing can be learned from, such as answers of no token.
    """

    generated: Tensor
    seen: Tensor
    windows: list[Window]
    silent: int
    by_category: dict[str, Tensor]


def survey(
    store: States, vocab_size: int, budget: int, num_steps: int, categories: Mapping[str, str] | None = None
) -> Survey:
    """Count tokens and cut windows; states are not read. `categories` are by prompt id."""
    by_category: dict[str, Tensor] = {}
    generated, seen = torch.zeros(vocab_size, dtype=torch.long), torch.zeros(vocab_size, dtype=torch.long)
    windows: list[Window] = []
    silent = 0
    for i in range(len(store)):
        tokens, mask = store.tokens(i)
        said = tokens[mask]
        counted = [(seen, tokens), (generated, said)]
        if (category := (categories or {}).get(store.ids[i])) is not None:
            counted.append((by_category.setdefault(category, torch.zeros_like(generated)), said))
        for counts, ids in counted:  # in place: a histogram per document would cost more than everything else here
            counts.index_add_(0, ids, torch.ones_like(ids))
        found = cut(i, mask, budget, num_steps)
        silent += not found
        windows += found
    return Survey(generated, seen, windows, silent, by_category)


def draft_vocabulary(recipe: Recipe, counts: Survey) -> DraftVocabulary:
    """The most frequent generated tokens, and every special token that the chat template can emit or the text holds.

    As many as head.draft_vocab_size says, or as head.coverage asks for.
    """
    special, emitted = special_tokens(recipe)
    # Multimodal tokenizers have ids past the rows of lm_head: read, never said.
    sayable = (i for i in special if i < len(counts.seen))
    required = torch.tensor(sorted(i for i in sayable if i in emitted or counts.seen[i] > 0), dtype=torch.long)
    share = recipe.head.coverage
    size = recipe.head.draft_vocab_size if share is None else size_for_coverage(counts.generated, share, required)
    return choose_vocabulary(counts.generated, size, required)


def build_model(
    shape: DraftShape, pieces: TargetPieces, vocabulary: DraftVocabulary, seed: int, blind: bool = False
) -> DraftModel:
    """A fresh head that starts from its target: lm_head rows and final norm are copied, not random.

    `blind` zeroes fc. Trained on zeroed states it stays zero, so the served head ignores the states it is given,
    as it did in training; a random fc would feed it noise.
    """
    torch.manual_seed(seed)
    model = DraftModel(shape)
    with torch.no_grad():
        model.lm_head.weight.copy_(pieces.lm_head[vocabulary.target_ids])
        model.norm.weight.copy_(pieces.final_norm)
        if blind:
            model.fc.weight.zero_()
    return model


def frozen_target(
    pieces: TargetPieces, spec: TargetSpec, vocabulary: DraftVocabulary, device: torch.device, dtype: torch.dtype
) -> FrozenTarget:
    """The target's tensors that training reads, on the device in the compute type."""
    target_ids = vocabulary.target_ids
    return FrozenTarget(
        embeddings=pieces.embed_tokens.to(device, dtype),
        final_norm=pieces.final_norm.to(device, torch.float32),
        head_rows=pieces.lm_head[target_ids].to(device, dtype),
        rms_norm_eps=spec.rms_norm_eps,
        target_ids=target_ids.to(device),
    )
