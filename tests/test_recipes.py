"""Every recipe for a public target, at that target's true size, on meta tensors: nothing is allocated or downloaded."""

import pytest
import torch

from data_gen.dry_run import STAGES
from drafthead.drafters.base import DraftShape, draft_shape
from drafthead.drafters.eagle3.drafter import DraftModel, Eagle3
from drafthead.drafters.vllm import check_config, expected_shapes
from drafthead.generation.sources import CATALOGUE
from drafthead.planning import Assumed
from drafthead.planning.memory import EngineMemory
from drafthead.planning.stages import plan_stages
from drafthead.target.spec import check_aux_layer_ids, load_target_spec
from tests.public_targets import RECIPES, shipped_recipe


def by_hand(shape: DraftShape) -> int:
    """Trainable weights of a head of one layer."""
    head, H = shape.head, shape.hidden_size
    q, kv = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
    block = 2 * H * (q + 2 * kv) + q * H + 3 * H * head.intermediate_size
    norms = (
        3 * H + H + (shape.num_aux_layers * H if head.norm_before_fc else 0)
    )  # of the block, the last one, before fc
    return block + shape.num_aux_layers * H * H + head.draft_vocab_size * H + norms


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_and_target_fit_and_the_head_has_its_size_and_keeps_the_contract(name, public_targets):
    recipe = shipped_recipe(name)
    spec = load_target_spec(recipe.target_path)
    assert recipe.engine.max_model_len <= spec.max_position_embeddings
    assert recipe.train.tokens_per_batch >= recipe.engine.max_model_len, "a document would be cut into windows"
    assert all(source.path or source.name in CATALOGUE for source in recipe.prompts.sources or ())
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    shape = draft_shape(recipe.head, spec, recipe.target.aux_layer_ids)
    with torch.device("meta"):
        model = DraftModel(shape)
    assert sum(p.numel() for p in model.parameters()) == by_hand(shape)
    config = Eagle3.vllm.plain_config(shape, recipe.target.aux_layer_ids, recipe.target.dtype)
    check_config(config, shape, recipe.target.aux_layer_ids, recipe.engine.max_model_len)
    maps = {
        "d2t": torch.empty(shape.head.draft_vocab_size, dtype=torch.int64, device="meta"),
        "t2d": torch.empty(shape.vocab_size, dtype=torch.bool, device="meta"),
    }
    written = Eagle3.vllm.exported_tensors({**model.state_dict(), **maps}, shape, recipe.target.dtype)
    assert {k: tuple(v.shape) for k, v in Eagle3.vllm.checkpoint_tensors(written).items()} == expected_shapes(shape)


@pytest.mark.parametrize("name", RECIPES)
def test_a_plan_of_all_stages_needs_only_config_json(name, public_targets, tmp_path):
    """No weights, tokenizer, prompts or GPU."""
    recipe = shipped_recipe(name, f"output_dir={tmp_path}/out")
    gpus = 8 if recipe.train.batches_per_step % 8 == 0 else 1  # of a recipe for a CPU
    for plan in plan_stages(recipe, Assumed(response_tokens=1000, gpus=gpus), STAGES):
        assert plan.gpus >= 1
        assert 0 < plan.memory_bytes < 80 << 30, plan
        assert plan.disk_bytes > 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("gpt-oss-120b", 65.2),
        ("gpt-oss-20b", 13.8),
        ("qwen3-30b-a3b", 61.1),
        ("llama-3.1-8b", 16.1),
        ("smollm2-135m", 0.269),
    ],
)
def test_targets_have_the_sizes_that_are_published(name, gigabytes, public_targets):
    engine = EngineMemory(shipped_recipe(name))
    assert engine.weight_bytes * engine.gpus / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_without_config_json_the_message_says_what_to_download(tmp_path, hub_cache):
    recipe = shipped_recipe("gpt-oss-120b", f"output_dir={tmp_path}")
    with pytest.raises(FileNotFoundError, match=r"run `hf download openai/gpt-oss-120b config\.json`"):
        plan_stages(recipe, Assumed(), STAGES)
