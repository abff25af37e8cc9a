"""Training through `accelerate launch` with real DeepSpeed: what a run leaves behind, and what it refuses."""

import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from drafthead import artifacts
from drafthead.data.store import StateStore
from drafthead.drafters.replay import empty_acceptance
from drafthead.drafters.trained import best_checkpoint, read_checkpoint
from drafthead.exporting.card import write_card
from drafthead.exporting.check import choose_documents, replayed_rounds
from drafthead.exporting.export import export_head
from drafthead.target.spec import load_target_spec
from drafthead.training.trainer import train
from tests.exporting.runs import list_files
from tests.scripts import run_python
from tests.training.launching import checkpoints, command, entries, forget_after, launch, losses, run
from tests.training.synthetic import small_recipe, synthetic_store

pytestmark = pytest.mark.slow


def test_a_run_learns_and_says_so(finished_run):
    steps, validations = entries(finished_run.run_dir), entries(finished_run.run_dir, "validation")
    manifest = artifacts.require(finished_run.run_dir, "run", "train")
    assert [e["step"] for e in steps] == list(range(1, manifest["counts"]["total_steps"] + 1))
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert manifest["counts"]["best_acceptance_length"] == max(v["acceptance_length"] for v in validations) > 2
    assert len(checkpoints(finished_run.run_dir)) <= 3  # two newest and the best
    # Every step carries the newest replay: length and joint prefix acceptance at the K to be served.
    replayed = {v["step"]: v for v in validations}
    assert replayed.keys() & {e["step"] for e in steps[:-1]}
    for before, after in pairwise(steps):
        if before["step"] in replayed:
            assert after["acceptance_length"] == replayed[before["step"]]["acceptance_length"]
            assert after["acceptance_length"] == pytest.approx(1 + sum(after["acceptance_per_position"]))
    assert steps[-1]["eta_seconds"] == 0
    assert all(e["tokens_per_second"] > 0 and e["memory_gib"] > 0 and e["grad_norm"] > 0 for e in steps)


def test_a_run_that_ended_before_retention_makes_up_for_it(finished_run, fresh_recipe):
    recipe = fresh_recipe()
    shutil.copytree(finished_run.run_dir, recipe.run_dir)
    remaining = checkpoints(recipe.run_dir)
    forget_after(recipe.run_dir, int(remaining[-1].name.removeprefix("step_")))
    shutil.copytree(remaining[0], recipe.run_dir / "checkpoints" / "step_00000001")
    run(recipe)
    assert checkpoints(recipe.run_dir) == remaining


def test_patience_ends_a_run_that_no_longer_gains_whatever_stops_it_before(fresh_recipe):
    recipe, options = fresh_recipe(), ("train.learning_rate=1e-12", "train.patience=2", "train.keep_checkpoints=3")
    assert "stopped: train.patience 2" in run(recipe, *options)
    counts = artifacts.require(recipe.run_dir, "run", "train")["counts"]
    # validated at 4, where it stays, at 8 and at 12
    assert (counts["best_step"], counts["step"], counts["without_rise"]) == (4, 12, 2) < (4, counts["total_steps"])
    undisturbed = losses(recipe.run_dir)
    for step in (8, 12):
        forget_after(recipe.run_dir, step)
        assert "stopped: train.patience 2" in run(recipe, *options)
        assert losses(recipe.run_dir) == undisturbed
    recipe = fresh_recipe(*options, "eval.num_draft_tokens=1")
    export_head(recipe, serve_check=False)
    card = write_card(recipe).read_text()
    assert "checkpoint step_00000004 | 3 | 0 |" in card  # as the run replayed it
    assert f"12 of {counts['total_steps']}, stopped by a patience of 2 validations" in card
    assert "at the best checkpoint, step 4" in card


@pytest.mark.parametrize("prompts", [6, 16])
def test_where_every_response_loops_the_best_is_chosen_and_said_to_be_of_loops(tmp_path, synthetic_data, prompts):
    """Of fewer than 16 the newest counts as best: at this rate every checkpoint is worth the same."""
    recipe, few = small_recipe(tmp_path), prompts < 16
    recipe.states_dir("train").parent.mkdir(parents=True)
    recipe.states_dir("train").symlink_to(small_recipe(synthetic_data).states_dir("train"))
    synthetic_store(recipe, "validation", prompts, seed=1, period=3)
    printed = run(recipe, *(["train.learning_rate=1e-12"] if few else []))
    validations = entries(recipe.run_dir, "validation")
    assert printed.count(f"all {prompts} validation responses loop") == len(validations) > 3
    assert printed.count("too few)") == (len(validations) + 1 if few else 0)
    counts = artifacts.require(recipe.run_dir, "run", "train")["counts"]
    lengths = {v["step"]: v["acceptance_length"] for v in validations}
    best = max(lengths.values()) if not few else lengths[counts["step"]]
    assert counts["best_acceptance_length"] == lengths[counts["best_step"]] == best
    assert counts["best_step"] == counts["step"] or not few
    export_head(recipe, serve_check=False)
    card = write_card(recipe).read_text()
    assert f"{prompts} validation prompts although every response loops" in card
    assert "the first 192 tokens of each" in card
    assert ("too few)" in card) == few
    assert not [path for path in recipe.run_dir.rglob("*.json*") if "NaN" in path.read_text()]


class Code:
    """What a pickle runs when it is opened."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("planted", ["*optim_states.pt", "*model_states.pt"])
def test_code_in_a_checkpoint_is_not_run(finished_run, fresh_recipe, tmp_path, planted):
    recipe = fresh_recipe()
    shutil.copytree(finished_run.run_dir, recipe.run_dir)
    newest = checkpoints(recipe.run_dir)[-1]
    forget_after(recipe.run_dir, int(newest.name.removeprefix("step_")))
    torch.save({"state": Code(tmp_path / "ran")}, next(newest.rglob(planted)))
    list_files(newest)  # whoever plants it rewrites the manifest, too
    result = launch(recipe)
    assert result.returncode == 1
    assert not (tmp_path / "ran").exists()
    assert re.search(rf"ArtifactError: .*{newest.name} .*: delete it", result.stderr)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--cpu",), "bypass DeepSpeed"), (("--num_processes", "2"), "asked for several processes and started one")],
)
def test_silent_failures_of_the_launcher_are_refused(fresh_recipe, flags, message):
    result = run_python(*command(fresh_recipe(), flags=flags))
    assert result.returncode != 0
    assert message in result.stderr


def test_a_finished_run_is_neither_repeated_nor_overwritten_by_another_configuration(finished_run):
    before = {path: path.stat().st_mtime_ns for path in finished_run.run_dir.rglob("*")}
    assert train(finished_run) == finished_run.run_dir
    with pytest.raises(artifacts.ArtifactError, match=r"train\.learning_rate: found 0\.003, wanted 0\.5"):
        train(finished_run.changed("train", learning_rate=0.5))
    assert {path: path.stat().st_mtime_ns for path in finished_run.run_dir.rglob("*")} == before


def test_a_block_in_both_directions_is_validated_as_long_as_it_is_served(fresh_recipe):
    """Three drafts in training and one served: its slot sees no others. The replay of an export check is the same."""
    block = ("head.type=dflash", "head.mask_token_id=3000", "head.num_draft_positions=3", "head.causal=false")
    recipe = fresh_recipe(*block, "eval.num_draft_tokens=1")
    run(recipe, *block, "eval.num_draft_tokens=1")
    source, store = read_checkpoint(best_checkpoint(recipe.run_dir)), StateStore(recipe.states_dir("validation"))
    documents, _ = choose_documents(store, recipe, len(store), 100_000)
    shape = source.shape(load_target_spec(recipe.target_path))
    rounds = sum(replayed_rounds(recipe, store, documents, source.weights(), shape), empty_acceptance(1))
    assert rounds.length > 1.2
    assert source.state["acceptance_length"] == pytest.approx(rounds.length)
