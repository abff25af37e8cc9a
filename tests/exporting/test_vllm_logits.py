"""Every shape of head that can be configured, through vLLM's own model class: the logits it gives are ours."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from drafthead.config import Recipe
from drafthead.drafters.vllm import check_config
from tests.exporting.runs import config_of, random_weights, recipe_at, shape_of, write_random_head
from tests.exporting.vllm_model import TOKENS, VllmDraft, one_rank, our_logits, two_steps

pytestmark = pytest.mark.slow

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
READ = {1: (6,), 2: (3, 8), 3: (2, 4, 6), 4: (0, 2, 5, 8)}


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


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Iterator[VllmDraft]:
    recipe = recipe_at(tmp_path_factory.mktemp("first"))
    with one_rank():
        yield VllmDraft(recipe, write_random_head(recipe))


def agrees(draft: VllmDraft, recipe: Recipe) -> bool:
    """Whether vLLM and our code give the same logits for a head, over random states and embeddings."""
    shape, generator = shape_of(recipe), torch.Generator().manual_seed(1)
    H, weights = shape.hidden_size, random_weights(shape)
    aux = torch.randn(TOKENS, 4 * H, generator=generator)[:, : shape.num_aux_layers * H]
    embeddings = torch.randn(TOKENS + 1, H, generator=generator)
    check_config(config_of(recipe), shape, recipe.target.aux_layer_ids, recipe.engine.max_model_len)
    theirs = two_steps(draft, draft.load(write_random_head(recipe, weights)), aux, embeddings)
    ours = our_logits(shape, weights, aux, embeddings)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(theirs, ours, strict=True))


# Every fifth has each pair of settings; the rest of them takes half a minute.
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_vllm_computes_our_logits_for_every_combination(draft, tmp_path, every):
    wrong = [c for c in combinations()[::every] if not agrees(draft, recipe_of(tmp_path, *c))]
    assert not wrong, f"{len(wrong)} heads differ, such as {wrong[:3]}"
