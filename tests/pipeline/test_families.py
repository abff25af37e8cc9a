"""Targets of the other families that recipes are shipped for, from prompts to a head that vLLM drafts with."""

import pytest

from drafthead.artifacts import require
from drafthead.config import load_recipe
from drafthead.target.pieces import load_target_spec
from tests.pipeline.families import FAMILIES, write_target
from tests.scripts import accelerate, run_ok

_SMALL = (
    "target.aux_layer_ids=[1,2,3]", "prompts.max_train=96", "prompts.max_heldout=8", "prompts.validation=16",
    "responses.temperature=1", "responses.max_tokens=48", "responses.prompts_per_part=96", "head.draft_vocab_size=1024",
    "train.epochs=20", "train.checkpoint_every=100", "train.learning_rate=3e-3",
)  # fmt: skip


@pytest.mark.presets
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gets_a_head_that_vllm_accepts(family, tmp_path):
    target = write_target(family, tmp_path / "target")
    overrides = (f"output_dir={tmp_path / 'out'}", f"target.path={target}", *_SMALL)
    for script in ("data_gen/prompts.py", "data_gen/regenerate.py", "data_gen/harvest.py"):
        run_ok(script, *overrides)
    run_ok(*accelerate(), "train/eagle3.py", *overrides)
    run_ok("export/head.py", *overrides)  # which compares served acceptance with the prediction
    recipe = load_recipe(overrides=overrides)
    served = require(recipe.head_dir, "head", "export")["counts"]["serve_check"]
    assert served["served"] > 3
    assert load_target_spec(str(target)).tie_word_embeddings == ("tied" in family)
