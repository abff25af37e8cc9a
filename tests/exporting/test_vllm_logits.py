"""Every shape of head that can be configured, through vLLM's own model class: the logits it gives are ours."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafthead.config import Recipe
from drafthead.drafters.base import DraftShape, draft_shape
from drafthead.drafters.vllm import check_config
from drafthead.exporting.export import write_head
from drafthead.target.pieces import TargetSpec, load_target_spec
from tests.exporting.runs import random_weights, recipe_at
from tests.exporting.vllm_model import TOKENS, VllmDraft, one_rank, our_logits, two_steps

pytestmark = pytest.mark.slow

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
READ = {1: (6,), 2: (3, 8), 3: (2, 4, 6), 4: (0, 2, 5, 8)}


@dataclass(frozen=True)
class Inputs:
    """Random states (T, 4 H) and embeddings (T + 1, H) for a target."""

    spec: TargetSpec
    aux: Tensor
    embeddings: Tensor


def combinations() -> list[tuple[tuple[bool, ...], int, int, int]]:
    """Norms on or off, number of aux layers, layers, draft vocabulary (3072 is the target's whole one): 256 heads."""
    return list(product(product((False, True), repeat=4), READ, (1, 2), (256, 3072)))


def recipe_of(root: Path, norms: tuple[bool, ...], read: int, layers: int, vocabulary: int) -> Recipe:
    switches = [f"head.{name}={str(on).lower()}" for name, on in zip(NORMS, norms, strict=True)]
    name = "-".join([*(str(int(on)) for on in norms), str(read), str(layers), str(vocabulary)])
    return recipe_at(
        root, f"name=h{name}", f"target.aux_layer_ids={list(READ[read])}", f"head.num_layers={layers}",
        f"head.draft_vocab_size={vocabulary}", "target.dtype=float32", *switches,
    )  # fmt: skip


def write(recipe: Recipe, shape: DraftShape, weights: dict[str, Tensor]) -> Path:
    """The files of an export."""
    config = write_head(recipe, recipe.head_dir, weights, shape, recipe.target.aux_layer_ids)
    check_config(config, shape, recipe.target.aux_layer_ids, recipe.engine.max_model_len)
    return recipe.head_dir


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    spec = load_target_spec(recipe_at(Path("unused")).target_path)
    aux = torch.randn(TOKENS, 4 * spec.hidden_size, generator=generator)
    return Inputs(spec, aux, torch.randn(TOKENS + 1, spec.hidden_size, generator=generator))


@pytest.fixture(scope="module")
def draft(inputs, tmp_path_factory) -> Iterator[VllmDraft]:
    recipe = recipe_at(tmp_path_factory.mktemp("first"))
    shape = draft_shape(recipe.head, inputs.spec, recipe.target.aux_layer_ids)
    with one_rank():
        yield VllmDraft(recipe, write(recipe, shape, random_weights(shape)))


def agrees(draft: VllmDraft, inputs: Inputs, recipe: Recipe) -> bool:
    """Whether vLLM and our code give the same logits for a head."""
    shape = draft_shape(recipe.head, inputs.spec, recipe.target.aux_layer_ids)
    weights = random_weights(shape)
    aux = inputs.aux[:, : shape.num_aux_layers * shape.hidden_size]
    model = draft.load(write(recipe, shape, weights))
    theirs = two_steps(draft, model, aux, inputs.embeddings)
    ours = our_logits(shape, weights, aux, inputs.embeddings)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(theirs, ours, strict=True))


# Every fifth has each pair of settings; the rest of them takes half a minute.
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_vllm_computes_our_logits_for_every_combination(draft, inputs, tmp_path, every):
    wrong = [c for c in combinations()[::every] if not agrees(draft, inputs, recipe_of(tmp_path, *c))]
    assert not wrong, f"{len(wrong)} heads differ, such as {wrong[:3]}"
