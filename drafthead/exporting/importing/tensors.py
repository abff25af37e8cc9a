"""A public head's tensors under the names of a checkpoint, complete and in float32."""

import torch
from torch import Tensor

from drafthead.exporting.contract import checkpoint_tensors
from drafthead.target.pieces import TargetPieces

# Copies of the target that some trainers store in the head, for training only.
_OF_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")
_EMBEDDING = "embed_tokens.weight"


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint names: no `model.`, the first layer as `midlayer`, no copies of the target, fp8 multiplied out."""
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if len(plain) != len(tensors):
        raise ValueError("the head holds the same tensor with and without the prefix `model.`")
    return {name: t for name, t in checkpoint_tensors(plain).items() if name not in _OF_TARGET}


def completed(tensors: dict[str, Tensor], draft_vocab_size: int, pieces: TargetPieces) -> dict[str, Tensor]:
    """Add what the file leaves to the target: lm_head, and the maps of a whole vocabulary.

    Args:
        tensors: by checkpoint names.
        draft_vocab_size: D.
        pieces: of the target; its embedding is the only one a head can have here.

    Raises:
        ValueError: the head has an embedding of its own, or a pruned vocabulary without d2t.
    """
    tensors = dict(tensors)
    embedding = tensors.pop(_EMBEDDING, None)
    if embedding is not None and not torch.equal(embedding.bfloat16(), pieces.embed_tokens.bfloat16()):
        raise ValueError(
            "the head has an embedding of its own; here a head shares its target's. vLLM may serve the original"
        )
    tensors |= _maps(tensors, draft_vocab_size, pieces)
    if "lm_head.weight" not in tensors:  # tied to the target's, or left out because it is
        tensors["lm_head.weight"] = pieces.lm_head[tensors["t2d"].nonzero()[:, 0]]
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def _maps(tensors: dict[str, Tensor], size: int, pieces: TargetPieces) -> dict[str, Tensor]:
    """d2t as int64 offsets and t2d, from whichever the file has."""
    vocab_size = pieces.embed_tokens.shape[0]
    if size == vocab_size:
        return {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size, dtype=torch.bool)}
    if "d2t" not in tensors:
        raise ValueError(f"the head proposes {size} of {vocab_size} tokens and has no d2t to say which")
    d2t = tensors["d2t"].long()
    ids = d2t + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(
            f"d2t maps to ids {int(ids.min())} to {int(ids.max())} of {vocab_size}: are these ids instead of offsets?"
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": d2t, "t2d": tensors["t2d"].bool() if "t2d" in tensors else t2d}
