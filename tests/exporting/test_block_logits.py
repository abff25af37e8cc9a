"""DFlash and DSpark heads through vLLM's own model classes: the logits of a block are ours."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafthead.drafters.base import frozen_copy
from drafthead.drafters.batch import tail_layout
from drafthead.engine.offline import repair_cpu_build
from drafthead.losses.fused import HeadRows
from tests.exporting.runs import random_weights, recipe_at, shape_of, write_random_head
from tests.exporting.vllm_model import VllmDraft, one_rank

pytestmark = pytest.mark.slow

TOKENS, K = 6, 4
CLASSES = {"dflash": "qwen3_dflash.DFlashQwen3ForCausalLM", "dspark": "qwen3_dspark.Qwen3DSparkForCausalLM"}


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    recipe = recipe_at(tmp_path_factory.mktemp("first"))
    with one_rank():
        repair_cpu_build()
        yield VllmDraft(recipe, write_random_head(recipe))


@pytest.mark.parametrize("vocabulary", [256, 3072])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", CLASSES)
def test_blocks_have_the_logits_of_vllm(draft, tmp_path, kind, causal, num_layers, vocabulary):
    recipe = recipe_at(
        tmp_path, f"head.type={kind}", "head.mask_token_id=9", f"head.num_layers={num_layers}", "target.dtype=float32",
        f"head.draft_vocab_size={vocabulary}", f"head.causal={causal}",
    )  # fmt: skip
    shape = shape_of(recipe)
    weights = random_weights(shape)
    weights |= {name: torch.randn_like(t) for name, t in weights.items() if "markov" in name or "confidence" in name}
    write_random_head(recipe, weights)
    generator = torch.Generator().manual_seed(2)
    aux = torch.randn(TOKENS, shape.num_aux_layers * shape.hidden_size, generator=generator)
    first = 1 if kind == "dflash" else 0  # slots that predict nothing
    block = torch.randn(K + first, shape.hidden_size, generator=generator)
    previous = torch.randint(0, shape.vocab_size, (K,), generator=generator)
    theirs, confidence = vllm_logits(draft, recipe.head_dir, kind, aux, block, previous, first)

    model = frozen_copy(shape, weights, torch.device("cpu"), torch.float32)
    slots = [row[None] for row in block]
    states = model.fill(slots, aux, torch.arange(TOKENS), tail_layout([TOKENS], [TOKENS - 1]))[:, 0]
    if kind == "dspark":
        states = torch.cat([states, model.markov_head.markov_w1(previous)], dim=-1)
    torch.testing.assert_close(states @ model.head_weight.T, theirs, rtol=0, atol=2e-4)
    ours = model.confidence(HeadRows(states, torch.zeros(K, dtype=torch.long), (1,) * K))
    assert (ours is None) == (confidence is None) == (kind == "dflash")
    if ours is not None:
        torch.testing.assert_close(ours.sigmoid(), confidence, rtol=0, atol=2e-4)


@torch.no_grad()
def vllm_logits(
    draft: VllmDraft, head: Path, kind: str, aux: Tensor, block: Tensor, previous: Tensor, first: int
) -> tuple[Tensor, Tensor | None]:
    """(K, D) and (K,): the context written as the proposer writes it, then one pass over the block."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    model = draft.load(head, kind, CLASSES[kind])
    for layer in model.model.layers:
        _over_context(layer.self_attn.attn, layer.self_attn.causal)
    with set_current_vllm_config(draft.config), set_forward_context(None, draft.config):
        context = model.combine_hidden_states(aux)
        positions = torch.arange(TOKENS + len(block))
        model.precompute_and_store_context_kv(context, positions[:TOKENS], positions[:TOKENS])
        states = model(None, positions[TOKENS:], inputs_embeds=block)[first:]
        logits = model.logits_processor(model.lm_head, states)
        if kind == "dflash":
            return logits, None
        markov = model.markov_embed(previous)
        return logits + model.markov_bias(markov), model.compute_confidence(states, markov)


def _over_context(attention, causal: bool) -> None:
    """Attention over what was written for the context and the block itself, in place of the paged kernel."""
    written = []
    attention.kv_cache = None
    attention.impl.do_kv_cache_update = lambda layer, key, value, cache, slots: written.append((key, value))

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        size = attention.head_size
        (context_key, context_value), *_ = written
        keys, values = (
            torch.cat([one, other.unflatten(-1, (-1, size))]).transpose(0, 1)
            for one, other in ((context_key, key), (context_value, value))
        )
        query = query.unflatten(-1, (-1, size)).transpose(0, 1)
        seen = torch.ones(query.shape[1], keys.shape[1], dtype=torch.bool).tril(TOKENS if causal else len(keys[0]))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1)

    attention.forward = forward
