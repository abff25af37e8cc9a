"""Which drafts vLLM serves with one group of KV cache only, against vLLM's own arithmetic."""

import json

import pytest
import torch

from drafthead.engine.offline import import_vllm, needs_one_cache_group
from tests.engine.shards import config_without_model
from tests.recipes import tiny_recipe

TARGETS = {"gpt-oss": (18, 18, 8, 64), "gemma-like": (4, 20, 4, 256)}


def groups_with_a_draft(target, layers: int, heads: int, dim: int, window: int | None = None) -> int:
    """In how many of vLLM's groups the draft's layers lie."""
    import_vllm()
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    full, windowed, target_heads, target_dim = target
    config = config_without_model(8192)
    layout = {"block_size": 16, "dtype": torch.bfloat16, "num_kv_heads": target_heads, "head_size": target_dim}
    specs = {f"target.{i}": FullAttentionSpec(**layout) for i in range(full)}
    specs |= {f"target.w{i}": SlidingWindowSpec(**layout, sliding_window=128) for i in range(windowed)}
    drafts = layout | {"num_kv_heads": heads, "head_size": dim}
    if window:
        specs |= {f"draft.{i}": SlidingWindowSpec(**drafts, sliding_window=window) for i in range(layers)}
    else:
        specs |= {f"draft.{i}": FullAttentionSpec(**drafts) for i in range(layers)}
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    return sum(any(name.startswith("draft") for name in group.layer_names) for group in groups)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("window", [None, 128, 2048])
def test_one_group_is_asked_for_where_vllm_would_make_several(tmp_path, name, alike, window):
    full, windowed, heads, dim = TARGETS[name]
    kinds = ["full_attention"] * full + ["sliding_attention"] * windowed
    shape = {"num_attention_heads": 8, "num_key_value_heads": heads, "head_dim": dim}
    target, head = tmp_path / "target", tmp_path / "head"
    for directory in (target, head):
        directory.mkdir()
    (target / "config.json").write_text(json.dumps(shape | {"layer_types": kinds, "sliding_window": 128}))
    recipe = tiny_recipe(tmp_path, f"target.path={target}")
    if not alike:
        heads = heads // 2
    seen = set()
    for layers in (1, 2, 3, 4, 5, 6, 8, 9, 12, 26, 27, 28):
        config = shape | {"num_key_value_heads": heads, "num_hidden_layers": layers}
        if window:
            config |= {"layer_types": ["sliding_attention"] * layers, "sliding_window": window}
        (head / "config.json").write_text(json.dumps(config))
        expected = groups_with_a_draft(TARGETS[name], layers, heads, dim, window) > 1
        assert needs_one_cache_group(recipe, str(head)) == expected, layers
        seen.add(expected)
    assert seen == {True, False}


def test_nothing_is_asked_for_without_attention_or_a_draft_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa", "num_hidden_layers": 1}))
    for head in (str(tmp_path), None, "org/not-here"):
        assert not needs_one_cache_group(tiny_recipe(tmp_path), head)
