"""Every shape of head that can be configured, through vLLM's own model classes: the logits they give are ours.

One engine configuration is made with the first head; every further head only replaces the draft's config, as vLLM
parses it, before the class is built and fed through vLLM's own weight loader. The paged attention kernel needs an
engine's KV cache, so it alone is replaced, by PyTorch's attention over the same q, k and v: projections, rotary
embedding, norms, residuals, fc, logits and the vocabulary map are vLLM's.

Shapes: T tokens, N aux layers, H hidden, V target vocabulary, D draft vocabulary, K draft positions.
"""

import tempfile
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.config import Recipe
from drafthead.drafters.base import DraftShape, frozen_copy
from drafthead.drafters.batch import tail_layout
from drafthead.drafters.eagle3.drafter import Eagle3
from drafthead.drafters.vllm import check_config
from drafthead.engine.offline import engine_arguments, import_vllm, repair_cpu_build
from drafthead.exporting.export import export_head
from drafthead.exporting.importing import import_head
from drafthead.losses.fused import HeadRows
from drafthead.target.pieces import load_pieces
from tests.exporting.runs import (
    by_frequency,
    config_of,
    float16_of_bf16,
    fused,
    random_weights,
    recipe_at,
    shape_of,
    write_random_head,
)
from tests.rounding import rounding

pytestmark = pytest.mark.slow

TOKENS, K = 6, 4
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
READ = {1: (6,), 2: (3, 8), 3: (2, 4, 6), 4: (0, 2, 5, 8)}
CLASSES = {
    "eagle3": "llama_eagle3.Eagle3LlamaForCausalLM",
    "dflash": "qwen3_dflash.DFlashQwen3ForCausalLM",
    "dspark": "qwen3_dspark.Qwen3DSparkForCausalLM",
}


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory) -> Iterator[Any]:
    """Of an engine with a draft model, in a process group of one, as vLLM's parallel layers expect."""
    import_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    recipe = recipe_at(tmp_path_factory.mktemp("first"))
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel()
        repair_cpu_build()
        speculative = Eagle3.vllm.speculative_config(write_random_head(recipe), 3)
        arguments = engine_arguments(recipe, speculative_config=speculative)
        arguments.pop("use_tqdm_on_load")
        yield EngineArgs(**arguments).create_engine_config()
        cleanup_dist_env_and_memory()


def load(vllm_config: Any, head: Path, method: str) -> Any:
    """vLLM's draft model of an exported directory, in either layout, with the target's embedding left at zero."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
    from vllm.utils.torch_utils import set_default_torch_dtype

    parsed = get_config(str(head), trust_remote_code=False)
    if not isinstance(parsed, SpeculatorsConfig):
        parsed = EAGLEConfig(parsed, method=method, model_type="eagle") if method != "dspark" else parsed
    vllm_config.speculative_config.draft_model_config.hf_config = parsed
    vllm_config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(torch.float32):
        module, _, name = CLASSES[method].partition(".")
        model = getattr(import_module(f"vllm.model_executor.models.{module}"), name)(vllm_config=vllm_config)
        model.load_weights(iter(load_file(head / "model.safetensors").items()))
        process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
    for layer in model.model.layers:
        _without_pages(layer.self_attn.attn, getattr(layer.self_attn, "causal", True))
    return model


def _without_pages(attention: Any, causal: bool) -> None:
    """Attention over what was written for the context, if anything was, and the tokens themselves."""
    written: list[tuple[Tensor, Tensor]] = []
    attention.kv_cache = None
    sinks = attention.impl.sinks
    attention.impl.do_kv_cache_update = lambda layer, key, value, cache, slots: written.append((key, value))

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (rows.unflatten(-1, (-1, attention.head_size)) for rows in (query, key, value))
        for context_key, context_value in written[:1]:
            key, value = torch.cat([context_key, key]), torch.cat([context_value, value])
        seen = torch.ones(len(query), len(key), dtype=torch.bool)
        seen = seen.tril(len(key) - len(query)) if causal else seen
        key, value = (rows.repeat_interleave(query.shape[1] // key.shape[1], 1) for rows in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * attention.head_size**-0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value).flatten(1)

    attention.forward = forward


# EAGLE-3: step by step


def combinations() -> list[tuple[tuple[bool, ...], int, int, int]]:
    """Norms on or off, number of aux layers, layers, draft vocabulary (3072 is the target's whole one): 256 heads."""
    return list(product(product((False, True), repeat=4), READ, (1, 2), (256, 3072)))


def recipe_of(root: Path, norms: tuple[bool, ...], read: int, layers: int, vocabulary: int) -> Recipe:
    switches = [f"head.{name}={str(on).lower()}" for name, on in zip(NORMS, norms, strict=True)]
    name = "-".join([*(str(int(on)) for on in norms), str(read), str(layers), str(vocabulary)])
    return recipe_at(
        root, f"name=h{name}", f"target.aux_layer_ids={list(READ[read])}", f"head.num_layers={layers}",
        f"head.draft_vocab_size={vocabulary}", *switches,
    )  # fmt: skip


@torch.no_grad()
def two_steps(vllm_config: Any, model: Any, aux: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Logits as the proposer makes them: over the verified tokens, then from the state that comes out.

    Args:
        vllm_config: configuration that the model was built with.
        model: model from `load`.
        aux: (T, N * H) aux hidden states.
        embeddings: (T + 1, H): entry t is read at position t.

    Returns:
        (T, V) of the first step at every position, (V,) of the second after the last one.
    """
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    tokens = aux.shape[0]
    with set_current_vllm_config(vllm_config), set_forward_context(None, vllm_config):
        features = model.combine_hidden_states(aux)
        states, recycled = model(None, torch.arange(tokens), features, inputs_embeds=embeddings[:tokens])
        longer = torch.cat([features, recycled[-1:]])
        after, _ = model(None, torch.arange(tokens + 1), longer, inputs_embeds=embeddings)
        return model.compute_logits(states), model.compute_logits(after[-1:])[0]


def our_logits(shape: DraftShape, weights: dict[str, Tensor], aux: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """(T, V) of the first step and (V,) of the second from the last position, minus infinity where no draft id is."""
    model = frozen_copy(shape, weights, torch.device("cpu"), torch.float32)
    # vLLM's rows hold the embedding they read: one more token in front, and states of two more that nobody sees.
    tokens, aux = torch.cat([embeddings[:1], embeddings]), torch.nn.functional.pad(aux, (0, 0, 0, 2))
    unrolled, _ = model.unroll(aux, tokens, torch.arange(TOKENS + 2), tail_layout([TOKENS + 2], [0]), 2)
    states = torch.stack(unrolled)[:, :TOKENS]
    logits = torch.full((2, TOKENS, shape.vocab_size), float("-inf"))
    logits[:, :, weights["t2d"].nonzero()[:, 0]] = model.lm_head(states)
    return logits[0], logits[1, -1]


def agrees(vllm_config: Any, recipe: Recipe) -> bool:
    """Whether vLLM and our code give the same logits for a head, over random states and embeddings."""
    shape, generator = shape_of(recipe), torch.Generator().manual_seed(1)
    H, weights = shape.hidden_size, random_weights(shape)
    aux = torch.randn(TOKENS, 4 * H, generator=generator)[:, : shape.num_aux_layers * H]
    embeddings = torch.randn(TOKENS + 1, H, generator=generator)
    check_config(config_of(recipe), shape, recipe.target.aux_layer_ids, recipe.engine.max_model_len)
    model = load(vllm_config, write_random_head(recipe, weights), "eagle3")
    theirs = two_steps(vllm_config, model, aux, embeddings)
    ours = our_logits(shape, weights, aux, embeddings)
    return all(torch.allclose(a, b, rtol=0, atol=allowed(a)) for a, b in zip(theirs, ours, strict=True))


def allowed(logits: Tensor) -> float:
    """How far apart ours may lie, after two steps of two layers: the longest sum is that of fc over four layers."""
    return rounding(torch.float32, 2 * 2 * 4 * 192) * float(logits[logits.isfinite()].abs().max())


# Every fifth has each pair of settings; the rest of them takes half a minute.
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_vllm_computes_our_logits_for_every_combination(vllm_config, tmp_path, every):
    wrong = [c for c in combinations()[::every] if not agrees(vllm_config, recipe_of(tmp_path, *c))]
    assert not wrong, f"{len(wrong)} heads differ, such as {wrong[:3]}"


@pytest.mark.parametrize("written", [float16_of_bf16, by_frequency, fused])
def test_vllm_computes_the_same_logits_after_import_and_export(vllm_config, tmp_path, written):
    """Of a head that was written otherwise than an export writes it; rounded to float16 on the way, where it was."""
    recipe, source = recipe_at(tmp_path / "here"), write_random_head(recipe_at(tmp_path / "elsewhere"))
    tensors = load_file(source / "model.safetensors")
    written(tensors, load_pieces(recipe.target_path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, source / "model.safetensors")
    import_head(recipe, str(source))
    exported = export_head(recipe, serve_check=False)
    shape, generator = shape_of(recipe), torch.Generator().manual_seed(1)
    aux = torch.randn(TOKENS, shape.num_aux_layers * shape.hidden_size, generator=generator)
    embeddings = torch.randn(TOKENS + 1, shape.hidden_size, generator=generator)
    before, after = (
        two_steps(vllm_config, load(vllm_config, head, "eagle3"), aux, embeddings) for head in (source, exported)
    )
    for theirs, ours in zip(before, after, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# DFlash and DSpark: a block at once


@pytest.mark.parametrize("vocabulary", [256, 3072])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(("causal", "sinks"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_blocks_have_the_logits_of_vllm(vllm_config, tmp_path, kind, causal, sinks, num_layers, vocabulary):
    recipe = recipe_at(
        tmp_path, f"head.type={kind}", "head.mask_token_id=9", f"head.num_layers={num_layers}",
        f"head.draft_vocab_size={vocabulary}", f"head.causal={causal}", f"head.attention_sinks={sinks}",
    )  # fmt: skip
    shape = shape_of(recipe)
    weights = random_weights(shape)
    weights |= {name: torch.randn_like(t) for name, t in weights.items() if "markov" in name or "confidence" in name}
    vllm_model = load(vllm_config, write_random_head(recipe, weights), kind)
    generator = torch.Generator().manual_seed(2)
    aux = torch.randn(TOKENS, shape.num_aux_layers * shape.hidden_size, generator=generator)
    first = 1 if kind == "dflash" else 0  # slots that predict nothing
    block = torch.randn(K + first, shape.hidden_size, generator=generator)
    previous = torch.randint(0, shape.vocab_size, (K,), generator=generator)
    theirs, confidence = block_logits(vllm_config, vllm_model, kind, aux, block, previous, first)

    model = frozen_copy(shape, weights, torch.device("cpu"), torch.float32)
    slots = [row[None] for row in block]
    states = model.fill(slots, aux, torch.arange(TOKENS), tail_layout([TOKENS], [TOKENS - 1]))[:, 0]
    if kind == "dspark":
        states = torch.cat([states, model.markov_head.markov_w1(previous)], dim=-1)
    torch.testing.assert_close(states @ model.head_weight.T, theirs, rtol=0, atol=allowed(theirs))
    ours = model.confidence(HeadRows(states, torch.zeros(K, dtype=torch.long), (1,) * K))
    assert (ours is None) == (confidence is None) == (kind == "dflash")
    if ours is not None:
        torch.testing.assert_close(ours.sigmoid(), confidence, rtol=0, atol=allowed(theirs))


@torch.no_grad()
def block_logits(
    vllm_config: Any, model: Any, kind: str, aux: Tensor, block: Tensor, previous: Tensor, first: int
) -> tuple[Tensor, Tensor | None]:
    """(K, D) and (K,): the context written as the proposer writes it, then one pass over the block."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with set_current_vllm_config(vllm_config), set_forward_context(None, vllm_config):
        context = model.combine_hidden_states(aux)
        positions = torch.arange(TOKENS + len(block))
        model.precompute_and_store_context_kv(context, positions[:TOKENS], positions[:TOKENS])
        states = model(None, positions[TOKENS:], inputs_embeds=block)[first:]
        logits = model.logits_processor(model.lm_head, states)
        if kind == "dflash":
            return logits, None
        markov = model.markov_embed(previous)
        return logits + model.markov_bias(markov), model.compute_confidence(states, markov)
