"""The cache that a harvest needs, against vLLM's own arithmetic, which shipped recipe starts on which GPU, and what the
connector takes off the engine's share of memory."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from drafthead.config import REPO_ROOT, load_recipe
from drafthead.engine import generate
from drafthead.engine.offline import import_vllm
from drafthead.planning import Assumed
from drafthead.planning.memory import check_fits, refusal, request_bytes
from drafthead.planning.stages import plan_stages
from drafthead.target.spec import load_target_spec
from tests.damage import edit_config
from tests.engine.shards import config_without_model
from tests.public_targets import RECIPES, shipped_recipe

GPUS_GIB = {"A100 40 GB": 39.4, "L40S": 44.5, "A100 80 GB": 79.3, "H100": 79.6, "H200": 139.8, "B200": 178.3}
TOO_SMALL = {
    "gpt-oss-120b": {"A100 40 GB", "L40S", "A100 80 GB", "H100"},
    "gpt-oss-120b-late": {"A100 40 GB", "L40S", "A100 80 GB", "H100"},
    "qwen3-30b-a3b": {"A100 40 GB", "L40S"},
}


def vllm_bytes(layers, windowed, window, heads, head_dim, boundaries, hidden, length, batched) -> int:
    """What vLLM asks for to serve one request."""
    import_vllm()
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, HiddenStateCacheSpec, SlidingWindowSpec

    config = config_without_model(length)
    config.scheduler_config.max_num_batched_tokens = batched
    common = {"block_size": 16, "num_kv_heads": heads, "head_size": head_dim, "dtype": torch.bfloat16}
    specs = {f"layers.{i}.attn": FullAttentionSpec(**common) for i in range(windowed, layers)}
    specs |= {f"layers.{i}.attn": SlidingWindowSpec(**common, sliding_window=window) for i in range(windowed)}
    specs["states"] = HiddenStateCacheSpec(
        block_size=16, num_kv_heads=boundaries, head_size=hidden, dtype=torch.bfloat16
    )
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    return kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)


@pytest.mark.parametrize(
    "shape",
    [
        (36, 18, 128, 8, 64, 4, 2880),  # gpt-oss-120b
        (36, 18, 128, 4, 64, 4, 2880),  # on two GPUs: the states of a token are larger than a page
        (36, 18, 128, 1, 64, 4, 2880),
        (24, 12, 128, 8, 64, 4, 2880),  # gpt-oss-20b
        (36, 0, 0, 8, 128, 4, 4096),  # qwen3-8b
    ],
)
@pytest.mark.parametrize(("length", "batched"), [(16_384, 16_384), (8_000, 2_048)])
def test_the_cache_of_one_request_is_vllms(shape, length, batched):
    layers, windowed, window, heads, head_dim, boundaries, hidden = shape
    token_bytes, states_bytes = 4 * heads * head_dim, 2 * boundaries * hidden
    found = request_bytes(layers, windowed, window, token_bytes, states_bytes, length, batched)
    assert found == vllm_bytes(*shape, length, batched)


@pytest.mark.parametrize("name", RECIPES)
def test_what_does_not_start_is_known_before_the_weights_are_loaded(name, public_targets):
    recipe = shipped_recipe(name)
    found = {gpu for gpu, gib in GPUS_GIB.items() if refusal(recipe, gib)}
    assert found == TOO_SMALL.get(name, set())


def test_weights_of_an_unknown_quantisation_refuse_nothing(target):
    recipe = load_recipe(overrides=[f"target.path={target}"])
    for method, refused in (("fp8", True), ("compressed-tensors", False)):
        edit_config(target, quantization_config={"quant_method": method})
        assert bool(refusal(recipe, 1)) == refused


def test_a_plan_says_it_and_a_harvest_refuses(public_targets, monkeypatch):
    recipe = load_recipe(REPO_ROOT / "configs" / "gpt-oss-120b.yaml")
    why = refusal(recipe, 80)
    assert "engine.tensor_parallel_size" in why
    small, large = (
        plan_stages(recipe, Assumed(prompts=3, gpu_memory_gib=size), ["harvest"])[0].notes for size in (80, 141)
    )
    assert why in small
    assert why not in large
    import_vllm()
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_total_memory=lambda: int(79.6 * 2**30))
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    with pytest.raises(ValueError, match=r"engine\.max_model_len 16384"):
        check_fits(recipe)


def test_head_and_rows_are_taken_off_the_engines_share(public_targets, monkeypatch):
    recipe = load_recipe(REPO_ROOT / "configs" / "gpt-oss-120b.yaml")
    spec, started = load_target_spec(recipe.target_path), {}
    import_vllm()

    @contextmanager
    def engine(recipe, **options):
        started.update(options)
        yield

    platform = SimpleNamespace(get_device_total_memory=lambda: 100 * 2**30)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setattr(generate, "on_cpu", lambda: False)
    monkeypatch.setattr(generate, "offline_engine", engine)
    with generate.capturing_engine(recipe, spec):
        pass
    head, logits, rows = 201_088 * 2880 * 2, 2 * 512 * 201_088 * 4, 2 * 16_384 * 4 * 2880 * 2
    reserved = (head + logits + rows) / (100 * 2**30)
    assert started["gpu_memory_utilization"] == pytest.approx(recipe.engine.gpu_memory_utilization - reserved)
