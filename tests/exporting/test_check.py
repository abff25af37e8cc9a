"""Unusual heads in whole engines: greedy responses unchanged, and the counters are those of the replay.

An engine of the speculators layout is started from the head's directory alone. What every combination of settings
computes is compared in test_vllm_logits.py.
"""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data.packing import pack, whole
from drafthead.data.responses import loops
from drafthead.data.store import StateStore
from drafthead.drafters.base import draft_shape
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import last_response
from drafthead.drafters.vocabulary import DraftVocabulary, choose_vocabulary
from drafthead.exporting.export import export_head
from drafthead.generation.harvest import harvest
from drafthead.generation.prompts import make_prompts
from drafthead.generation.regenerate import regenerate
from drafthead.target.pieces import frozen_target, load_pieces
from drafthead.training.trainer import LossModule
from tests.exporting.runs import recipe_at, write_run

pytestmark = pytest.mark.slow

FEW = ("prompts.max_train=14", "prompts.validation=12", "head.num_layers=2", "states.backend=transformers")
HEADS = {
    "four aux layers with the embeddings, a sliding window, every norm, cut where evaluation cuts": (
        "target.aux_layer_ids=[0,2,5,8]", "head.fc_norm=true", "head.norm_output=true",
        "head.norm_before_residual=true", "head.sliding_window=16", "export.format=speculators", "eval.max_tokens=100",
    ),
    "P-EAGLE in the speculators layout, the whole vocabulary, fc_norm": (
        "target.aux_layer_ids=[2,5,8]", "head.type=peagle", "head.mask_token_id=9", "head.draft_vocab_size=3072",
        "head.fc_norm=true", "head.norm_before_fc=false", "export.format=speculators",
    ),
    "DFlash with a sliding window and sinks that sees a block in both directions": (
        "target.aux_layer_ids=[2,5,8]", "head.type=dflash", "head.mask_token_id=9", "head.sliding_window=16",
        "head.causal=false", "head.attention_sinks=true",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def responses(tmp_path_factory) -> Path:
    """The target's greedy float32 responses."""
    recipe = recipe_at(tmp_path_factory.mktemp("responses"), *FEW)
    make_prompts(recipe)
    regenerate(recipe)
    return recipe.responses_dir("train").parent


def fitted(recipe: Recipe, store: StateStore, num_steps: int) -> dict[str, Tensor]:
    """A head that has learnt these very responses a little: acceptance far from none and from all."""
    pieces = load_pieces(recipe.target_path)
    spec = pieces.spec
    K = "num_ttt_steps" if recipe.head.type == "eagle3" else "num_draft_positions"
    drafter = drafter_of(recipe.head.model_copy(update={K: recipe.eval.num_draft_tokens}))
    batch = pack(store, [whole(i, store.tokens(i)[1], drafter) for i in range(len(store))], drafter)
    batch = batch.to(torch.device("cpu"), torch.float32)
    counts = torch.bincount(batch.input_ids, minlength=spec.vocab_size)
    vocabulary: DraftVocabulary = choose_vocabulary(counts, recipe.head.draft_vocab_size, torch.tensor([0]))
    shape = draft_shape(recipe.head, spec, recipe.target.aux_layer_ids)
    model = drafter.from_target(shape, pieces, vocabulary, seed=0)
    for name, parameter in model.named_parameters():
        if "sink" in name:
            parameter.data.add_(2.0)  # without them drafts would be others
    target = frozen_target(pieces, vocabulary.target_ids, torch.device("cpu"), torch.float32)
    scale = (drafter.position_weights() / batch.scored.sum(1)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        LossModule(model)(batch, target, scale).loss.backward()
        optimizer.step()
    return {**model.state_dict(), "d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if "window" in n else n for n in HEADS])
def test_an_engine_runs_the_rounds_we_predict(responses, tmp_path: Path, name):
    recipe = recipe_at(tmp_path, *FEW, *HEADS[name])
    shutil.copytree(responses, recipe.responses_dir("train").parent)
    harvest(recipe)
    store = StateStore(recipe.states_dir("validation"))
    write_run(recipe, fitted(recipe, store, num_steps=45 if recipe.head.type == "dflash" else 15))
    unchecked = artifacts.require(export_head(recipe, serve_check=False), "head", "")
    manifest = artifacts.require(export_head(recipe), "head", "")  # the next call checks what was not
    assert artifacts.reference(manifest) == artifacts.reference(unchecked)  # results measured with it stay valid
    assert unchecked["counts"]["serve_check"] is None
    check = manifest["counts"]["serve_check"]
    documents = [store.tokens(index) for index in range(len(store))]
    assert check["tokens"] == recipe.eval.max_tokens
    assert check["looping"] == sum(loops(ids[last_response(mask, check["tokens"])]) for ids, mask in documents) > 0
    assert check["prompts"] + check["looping"] == len(documents) == 12
    assert check["same_text"] == check["prompts"], "speculation changed a greedy float32 response"
    assert check["same_rounds"] >= 0.9 * check["prompts"]
    assert check["served"] == pytest.approx(check["predicted"], rel=0.02)
    assert 1.2 < check["predicted"] < 4, "a head that is never accepted proves no parity"
