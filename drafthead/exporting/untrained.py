"""A head of the recipe's shape that was never trained: what it costs to run is what a trained one will cost.

Every step of it takes the same time as with trained weights, so its step times price a head that does not exist yet.
Its drafts are worth nothing.
"""

from pathlib import Path

import torch

from drafthead import provenance
from drafthead.config import Recipe
from drafthead.drafters.base import draft_shape
from drafthead.drafters.eagle3.model import DraftModel
from drafthead.drafters.vocabulary import choose_vocabulary
from drafthead.exporting.contract import exported_tensors, head_config
from drafthead.exporting.head import KIND, write_head
from drafthead.target.pieces import load_target_spec, target_identity


def write_untrained(recipe: Recipe) -> Path:
    """Write it to the recipe's head directory; returns that.

    Raises:
        ArtefactError: the directory holds another head.
        ValueError: the draft vocabulary's size is not known before there are responses.
    """
    if recipe.head.coverage is not None:
        raise ValueError(
            "head.coverage needs the target's responses to choose a size: for a plan give head.draft_vocab_size, "
            "with head.coverage=null"
        )
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    identity = {
        "target": target_identity(recipe, spec),
        "aux_layer_ids": list(recipe.target.aux_layer_ids),
        "head": recipe.head.model_dump(mode="json"),
        "untrained": True,
    }
    if provenance.begin(recipe.head_dir, KIND, identity, alone=True):
        return recipe.head_dir
    shape = draft_shape(recipe.head, spec, recipe.target.aux_layer_ids)
    torch.manual_seed(0)
    weights = DraftModel(shape).state_dict()
    vocabulary = choose_vocabulary(
        torch.zeros(shape.vocab_size), shape.head.draft_vocab_size, torch.zeros(0, dtype=torch.long)
    )
    tensors = {**weights, "d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    config = head_config(shape, recipe.target.aux_layer_ids, recipe.export.dtype, shape.max_position_embeddings)
    write_head(recipe.head_dir, config, exported_tensors(tensors, shape, recipe.export.dtype))
    provenance.finish(recipe.head_dir, {"parameters": sum(t.numel() for t in weights.values())})
    return recipe.head_dir
