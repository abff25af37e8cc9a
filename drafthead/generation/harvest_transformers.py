"""Harvesting with transformers: no vLLM needed, and a cross-check of the connector.

One sequence at a time through the reference model, in eager order. It gives up speed (no paging, no batching, no
tensor parallelism) and the guarantee that states come from the engine that will serve the head.

Shapes: T tokens, C captured boundaries (the aux layers and L, ascending), H hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.drafters.registry import drafter_of
from drafthead.engine.capture.shard_writer import ShardWriter
from drafthead.files import foreign
from drafthead.generation.shards import ShardJob
from drafthead.target.files import AGAIN, pinned_revision
from drafthead.target.pieces import TargetHead, TargetSpec, compute_dtype


@contextmanager
def transformers_harvester(recipe: Recipe, spec: TargetSpec) -> Iterator["TransformersHarvester"]:
    """A loaded model and a writer, closed when the block ends."""
    from transformers import AutoModelForCausalLM

    target, device = recipe.target, "cuda" if torch.cuda.is_available() else "cpu"
    with foreign(f"the target {target.path}", AGAIN):
        model = AutoModelForCausalLM.from_pretrained(
            recipe.target_path,
            revision=pinned_revision(recipe.target_path, target.revision),
            dtype=compute_dtype(spec, target.dtype),
            trust_remote_code=target.trust_remote_code,
        )
    head = TargetHead.load(recipe.target_path, target.revision, target.dtype, device)
    writer = ShardWriter(target.aux_layer_ids, spec.num_layers, head, recipe.states.format)
    boundaries = drafter_of(recipe.head).needs(spec, target.aux_layer_ids)
    try:
        yield TransformersHarvester(nn.Module.to(model, device).eval(), boundaries, writer)
    finally:
        writer.close()


class TransformersHarvester:
    """A worker of `drafthead.engine.running`."""

    def __init__(self, model: nn.Module, boundaries: tuple[int, ...], writer: ShardWriter):
        self._model, self._boundaries, self._writer = model, boundaries, writer

    def make(self, job: ShardJob, bar: tqdm) -> None:
        for slot, ids in zip(job.slots(), job.sequences(), strict=True):
            rows = capture(self._model, ids, self._boundaries)
            self._writer.add(slot, torch.tensor(ids, dtype=torch.int32), rows.cpu())
            bar.update(1)

    def finish(self) -> None:
        self._writer.finish()


@torch.no_grad()
def capture(model: nn.Module, token_ids: list[int], boundaries: tuple[int, ...]) -> Tensor:
    """Residual stream of one sequence at `boundaries`, (T, C, H).

    transformers returns boundary L after the final norm, so that one is taken where it enters the norm.
    """
    entering: list[Tensor] = []
    decoder: Any = model.base_model
    hook = decoder.norm.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
    try:
        ids = torch.tensor([token_ids], device=next(model.parameters()).device)
        states = decoder(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    finally:
        hook.remove()
    residual = [*states[:-1], entering[0]]  # boundaries 0 to L
    return torch.stack([residual[boundary][0] for boundary in boundaries], dim=1)
