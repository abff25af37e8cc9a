"""Training on from another run's weights: exactly those weights, checked against the recipe, and needed only once."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafthead import artifacts
from drafthead.artifacts import read_json
from drafthead.config import Recipe
from drafthead.data.packing import pack, plan_stream, whole
from drafthead.data.prompts import noted_prompts, read_trained_on, write_trained_on
from drafthead.data.store import StateStore
from drafthead.drafters.base import draft_shape, frozen_copy, load_trained
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.trained import Checkpoint
from drafthead.drafters.vocabulary import DraftVocabulary, choose_vocabulary
from drafthead.exporting.card import write_card
from drafthead.exporting.export import export_head
from drafthead.exporting.importing import import_head
from drafthead.target.pieces import frozen_target, load_pieces
from drafthead.target.spec import load_target_spec
from drafthead.target.tokenizer import special_tokens
from drafthead.training.inputs import find_start, open_inputs, survey
from drafthead.training.trainer import LossModule, train
from tests.damage import edit_config
from tests.exporting.runs import random_weights, shape_of, write_random_head, write_run
from tests.rounding import rounding
from tests.training.launching import entries, forget_after, launch, losses, run
from tests.training.synthetic import small_recipe

CPU = torch.device("cpu")


def first_loss(recipe: Recipe, weights: dict[str, torch.Tensor]) -> float:
    """Loss of the recipe's first optimiser step with these weights, from the batch itself."""
    inputs, config, drafter = open_inputs(recipe), recipe.train, drafter_of(recipe.head)
    windows = survey(inputs.train, inputs.spec.vocab_size, config.tokens_per_batch, drafter).windows
    stream = plan_stream(inputs.train, windows, config.tokens_per_batch, config.seed, config.epochs)
    batch = pack(inputs.train, stream[0], drafter).to(CPU, torch.float32)
    vocabulary = DraftVocabulary(weights["d2t"], weights["t2d"])
    target = frozen_target(load_pieces(recipe.target_path), vocabulary.target_ids, CPU, torch.float32)
    scale = drafter.position_weights() / batch.scored.sum(1)
    draft = frozen_copy(draft_shape(recipe.head, inputs.spec, recipe.target.aux_layer_ids), weights, CPU, torch.float32)
    with torch.no_grad():  # as it is logged: the objective alone
        module = LossModule(draft, temperature=config.temperature)
        return float(module(batch, target, scale.float()).loss)


@pytest.mark.slow
def test_training_goes_on_where_an_exported_head_left_off(finished_run, run_factory):
    """Train, export, import, start from it: the same weights to the last bit, and a record of where they came from."""
    first, second = run_factory("first"), run_factory("second")
    shutil.copytree(finished_run.run_dir, first.run_dir)
    learned = noted_prompts(first.run_dir)
    assert learned == {name for split in ("train", "validation") for name in StateStore(first.states_dir(split)).ids}
    write_trained_on(first.run_dir, learned | {"of its ancestor"})
    artifacts.finish(first.run_dir, artifacts.read_manifest(first.run_dir)["counts"])
    head = export_head(small_recipe(Path(first.output_dir)), serve_check=False)
    import_head(small_recipe(Path(second.output_dir), "name=elsewhere"), str(head))
    recipe = small_recipe(Path(second.output_dir), "train.init_from=runs/elsewhere")
    output = run(recipe, "train.init_from=runs/elsewhere")

    best = artifacts.require(first.run_dir, "run", "")["counts"]["best_step"]
    trained = load_file(first.run_dir / f"checkpoints/step_{best:08d}/model.safetensors")
    (expected,) = [e for e in entries(first.run_dir, "validation") if e["step"] == best]
    (first_entry, *_) = entries(recipe.run_dir, "validation")
    assert first_entry["step"] == 0
    for key in ("acceptance_length", "acceptance_per_position", "rounds"):
        assert first_entry[key] == expected[key]
    assert first_entry["first_step_loss"] == pytest.approx(expected["first_step_loss"], rel=1e-6)
    steps = entries(recipe.run_dir)
    assert steps[0]["loss"] == pytest.approx(first_loss(recipe, trained), rel=rounding(torch.float32, 3 * 192))
    assert steps[0]["loss"] < 0.5 * losses(first.run_dir)[0]
    assert steps[0]["learning_rate"] == pytest.approx(recipe.train.learning_rate)  # one step of warm-up, begun anew
    assert "runs/elsewhere" in output

    # Where it came from, in the manifest of run and head and on the card.
    record = artifacts.require(recipe.run_dir, "run", "")["identity"]["started_from"]
    assert (record["path"], record["step"], record["imported"]["path"]) == ("runs/elsewhere", 0, str(head))
    exported = export_head(recipe, serve_check=False)
    assert read_json(exported / "manifest.json")["identity"]["started_from"] == record
    assert read_trained_on(exported, artifacts.read_manifest(exported)) == learned | {"of its ancestor"}
    card = write_card(recipe).read_text()
    assert f"started from `runs/elsewhere`, imported from `{head}`" in card
    (exported / "training_prompts.json").write_text('{"ids": []}')
    with pytest.raises(artifacts.ArtifactError, match=r"training_prompts.json is missing or not what"):
        read_trained_on(exported, artifacts.read_manifest(exported))

    undisturbed = losses(recipe.run_dir)
    forget_after(recipe.run_dir, 16)
    assert "resuming from step 16" in run(recipe, "train.init_from=runs/elsewhere")
    assert losses(recipe.run_dir) == undisturbed


@pytest.fixture
def ancestor(fresh_recipe) -> Recipe:
    """A run of random weights called `other`, beside the recipe's data."""
    recipe = fresh_recipe("name=other")
    write_run(recipe)
    return recipe


def started(ancestor: Recipe, *overrides: str) -> Recipe:
    return small_recipe(Path(ancestor.output_dir), "train.init_from=runs/other", *overrides)


def start_of(recipe: Recipe) -> Checkpoint:
    return find_start(recipe, load_target_spec(recipe.target_path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("head.norm_before_residual=true", r"head.norm_before_residual: found True, wanted False"),
        ("head.draft_vocab_size=512", r"head.draft_vocab_size: found 512, wanted 256"),
        ("target.aux_layer_ids=[2,4,6]", r"target.aux_layer_ids: found \[2, 4, 6\], wanted \[2, 4, 8\]"),
        (
            "train.init_from=runs/nowhere",
            r"runs/nowhere is no run .*import_head.py RECIPE name=OTHER --head runs/nowhere",
        ),
        ("train.init_from=runs/other/checkpoints", r"checkpoints is not a checkpoint"),
        ("train.init_from=heads/other", r"heads/other is no run or checkpoint .*imported first"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_next_step(ancestor, override, message):
    if "heads" in override:
        export_head(ancestor, serve_check=False)
    recipe = started(ancestor, override)
    with pytest.raises(ValueError, match=message):
        start_of(recipe)
    assert not recipe.run_dir.exists()


def test_a_trained_head_may_learn_a_sliding_window(ancestor):
    recipe = started(ancestor, "head.sliding_window=32")
    start = start_of(recipe)
    assert start.run["head"]["sliding_window"] is None
    assert first_loss(recipe, start.weights()) != first_loss(started(ancestor), start.weights())


def test_a_head_whose_vocabulary_was_chosen_by_coverage_is_taken_as_it_is(fresh_recipe):
    by_coverage = ("head.draft_vocab_size=0", "head.coverage=0.9")
    other = fresh_recipe("name=other", *by_coverage)
    write_run(other, random_weights(shape_of(small_recipe(Path(other.output_dir)))))
    for overrides in (by_coverage, ()):  # by the same rule, or by its size
        assert start_of(started(other, *overrides)) is not None


def test_a_damaged_checkpoint_is_refused(ancestor):
    path = ancestor.run_dir / "checkpoints/step_00000007/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(artifacts.ArtifactError, match=r"is damaged \(model.safetensors\)"):
        start_of(started(ancestor))


def test_an_imported_heads_own_rotation_goes_with_it(fresh_recipe, tmp_path):
    """Its rotary embedding and epsilon differ from the target's: they are trained with, recorded and exported."""
    other = fresh_recipe("name=other")
    public = write_random_head(small_recipe(tmp_path / "public"))
    rotation = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-4}
    edit_config(public, **rotation)
    import_head(other, str(public))
    exported = read_json(export_head(other, serve_check=False) / "config.json")
    recipe = started(other)
    inputs = open_inputs(recipe)
    assert not artifacts.begin(recipe.run_dir, "run", inputs.identity)
    shape = inputs.start.shape(inputs.spec)
    model = frozen_copy(shape, inputs.start.weights(), CPU, torch.float32)
    assert model.norm.eps == 1e-4
    assert model.rope(torch.tensor([1]), torch.float32)[0][0, 0, 0] == pytest.approx(0.5403023)  # cos 1, unscaled
    for values in (vars(shape), read_json(recipe.run_dir / "identity.json"), exported):
        assert {key: values[key] for key in rotation} == rotation


def test_a_start_from_a_run_that_is_still_going_stays_the_same_when_that_ends(ancestor):
    recipe = started(ancestor, "train.init_from=runs/other/checkpoints/step_00000007")
    finished = open_inputs(recipe).identity
    (ancestor.run_dir / "manifest.json").unlink()
    assert open_inputs(recipe).identity == finished


def test_states_of_a_target_in_another_precision_are_refused(fresh_recipe):
    with pytest.raises(artifacts.ArtifactError, match="dtype: found 'float32', wanted 'bfloat16'"):
        open_inputs(fresh_recipe().changed("target", dtype="bfloat16"))


def test_a_recipe_that_is_refused_leaves_no_run(fresh_recipe, monkeypatch, caplog):
    caplog.set_level("INFO", "drafthead")  # and back: a later rank makes the logger quiet, for good
    recipe = fresh_recipe("head.type=peagle", "head.num_draft_positions=3", "head.mask_token_id=3000")
    token = int(open_inputs(recipe).train.tokens(0)[0][0])
    refused = recipe.model_copy(update={"head": recipe.head.model_copy(update={"mask_token_id": token})})
    for rank in "01":  # the second begins after the first has ended
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match=f"head.mask_token_id {token} occurs"):
            train(refused)
        assert not recipe.run_dir.exists()


@pytest.mark.slow
def test_a_recipe_that_is_refused_after_its_model_is_made_leaves_no_run_either(fresh_recipe):
    recipe = fresh_recipe()
    refused = launch(recipe, "train.tracker=tensorboard", "train.batches_per_step=100000")
    assert "do not fill one optimiser step" in refused.stderr
    assert not recipe.run_dir.exists()


def test_ranks_that_do_not_divide_a_step_are_refused(fresh_recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"batches_per_step 3 is not divisible by 2 ranks; set it to 4"):
        train(fresh_recipe("train.batches_per_step=3"))


@pytest.mark.slow
def test_the_vocabulary_is_chosen_again_from_the_new_text(ancestor):
    """The ancestor's is of random tokens; the run's covers its text, and keeps what the ancestor has otherwise."""
    recipe = started(ancestor)
    output = run(recipe, "train.init_from=runs/other")
    assert "the prompts that it learned from are not known" in output
    assert noted_prompts(recipe.run_dir) == open_inputs(recipe).prompt_ids  # its own are, whatever came before
    assert " covers 100.00% of generated tokens" in output
    before = load_file(ancestor.run_dir / "checkpoints/step_00000007/model.safetensors")["t2d"]
    after = load_file(max(recipe.run_dir.glob("checkpoints/*/model.safetensors")))["t2d"]
    assert before.sum() == after.sum() == 256
    inputs = open_inputs(recipe)
    generated = survey(inputs.train, len(after), recipe.train.tokens_per_batch, drafter_of(recipe.head)).generated
    unused = after & (generated == 0)
    assert {*(unused & ~before).nonzero()[:, 0].tolist()} <= special_tokens(recipe)[0]
    assert (unused & before).any()


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
def test_rows_of_tokens_in_both_vocabularies_are_kept_and_new_ones_begin_as_the_targets(kind, fresh_recipe):
    parallel = ("head.mask_token_id=9", "head.num_draft_positions=3") if kind != "eagle3" else ()
    recipe = fresh_recipe(f"head.type={kind}", *parallel)
    spec, pieces = load_target_spec(recipe.target_path), load_pieces(recipe.target_path)
    shape = draft_shape(recipe.head, spec, recipe.target.aux_layer_ids)
    start, drafter = random_weights(shape), drafter_of(recipe.head)
    before = DraftVocabulary(start["d2t"], start["t2d"])
    model = drafter.from_target(shape, pieces, before, 0)
    load_trained(model, before, start)
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())

    counts = torch.zeros(spec.vocab_size, dtype=torch.long)
    counts[1000:1300] = torch.arange(300, 0, -1)
    after = choose_vocabulary(counts, 256, torch.tensor([], dtype=torch.long))
    model = drafter.from_target(shape, pieces, after, 0)
    state = model.state_dict()
    assert torch.equal(state["lm_head.weight"], pieces.lm_head[after.target_ids].float())
    assert torch.equal(state["norm.weight"], pieces.final_norm.float())
    load_trained(model, after, start)
    ids = before.target_ids.tolist()
    places = {draft: ids.index(token) for draft, token in enumerate(after.target_ids.tolist()) if token in ids}
    assert 3 < len(places) < 253
    new = {"lm_head.weight": pieces.lm_head[after.target_ids].float()}
    if kind == "dspark":
        new["markov_head.markov_w2.weight"] = torch.zeros_like(start["markov_head.markov_w2.weight"])
    for name, expected in new.items():
        expected[list(places)] = start[name][list(places.values())]
        assert torch.equal(state[name], expected)
    further_names = [name for name in state if name not in drafter.MODULE(shape).draft_rows]
    assert all(torch.equal(state[name], start[name]) for name in further_names)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
def test_a_deep_head_begins_as_its_first_block(kind, fresh_recipe):
    parallel = ("head.mask_token_id=9", "head.num_draft_positions=3") if kind != "eagle3" else ()
    recipe = fresh_recipe(f"head.type={kind}", "head.num_layers=3", *parallel)
    inputs, pieces, drafter = open_inputs(recipe), load_pieces(recipe.target_path), drafter_of(recipe.head)
    shape = draft_shape(recipe.head, inputs.spec, recipe.target.aux_layer_ids)
    vocabulary = choose_vocabulary(torch.ones(inputs.spec.vocab_size), shape.head.draft_vocab_size, torch.tensor([0]))
    deep = drafter.from_target(shape, pieces, vocabulary, seed=0)
    shallow = drafter.MODULE(replace(shape, head=recipe.head.model_copy(update={"num_layers": 1})))
    shallow.load_state_dict({name: deep.state_dict()[name] for name in shallow.state_dict()})
    mask = inputs.train.tokens(0)[1]
    batch = pack(inputs.train, [whole(0, mask, drafter)], drafter).to(CPU, torch.float32)
    with_loss = batch.scored[:3].flatten()
    states = [model.head_rows(batch, pieces.embed_tokens.float(), 3).states[with_loss] for model in (deep, shallow)]
    torch.testing.assert_close(*states)
