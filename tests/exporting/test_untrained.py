"""A head of no training, for a plan before there is any."""

import pytest
from safetensors.torch import load_file

from drafthead.drafters.base import draft_shape
from drafthead.evaluation.reporting.plan_report import untrained_recipe
from drafthead.exporting.served import check_served
from drafthead.exporting.untrained import write_untrained
from drafthead.provenance import read_json, verify_files
from drafthead.target.pieces import load_target_spec
from tests.recipes import tiny_recipe


def test_an_untrained_head_is_one_that_vllm_reads(tmp_path):
    recipe = untrained_recipe(tiny_recipe(tmp_path), None)
    directory = write_untrained(recipe)
    assert directory.name == "tiny-untrained"
    assert verify_files(directory) == []
    assert write_untrained(recipe) == directory  # once
    shape = draft_shape(recipe, load_target_spec(recipe.target_path))
    check_served(read_json(directory / "config.json"), shape, recipe.target.aux_layer_ids, recipe.engine.max_model_len)
    assert load_file(directory / "model.safetensors")["d2t"].shape == (recipe.head.draft_vocab_size,)
    with pytest.raises(ValueError, match=r"head.coverage needs the target's responses"):
        write_untrained(tiny_recipe(tmp_path / "other", "head.coverage=0.9", "head.draft_vocab_size=0"))
