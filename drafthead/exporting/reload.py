"""The written file against the training module: the same logits, to the last bit."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafthead.drafters.base import DraftShape, frozen_copy
from drafthead.drafters.batch import tail_layout
from drafthead.drafters.eagle3.model import DraftModel
from drafthead.exporting.contract import as_served, checkpoint_tensors


@torch.no_grad()
def check_reload(directory: Path, weights: dict[str, Tensor], shape: DraftShape, dtype: str) -> float:
    """Compare the written file with the training module over two TTT steps of random states.

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
    rounded = as_served(weights, dtype)
    written = checkpoint_tensors(load_file(directory / "model.safetensors"))
    cpu = torch.device("cpu")
    models = [frozen_copy(shape, tensors, cpu, torch.float32) for tensors in (written, rounded, weights)]
    served, cast, trained = (probe_logits(model) for model in models)
    if not torch.equal(served, cast):
        raise ValueError(
            f"{directory} does not give the training module's logits: largest difference "
            f"{float((served - cast).abs().max()):.3g}; the written file is damaged or the export is wrong"
        )
    return float((served.argmax(-1) == trained.argmax(-1)).float().mean())


def probe_logits(model: DraftModel, num_steps: int = 2, length: int = 16) -> Tensor:
    """(K, T, D) logits of K steps over T random states, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    size = model.shape.hidden_size
    aux = torch.randn(length, model.shape.num_aux_layers * size, generator=generator)
    embeddings = torch.randn(length, size, generator=generator)
    return model.lm_head(model.unroll(aux, embeddings, torch.arange(length), tail_layout([length], [0]), num_steps))
