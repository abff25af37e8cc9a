"""ZeRO 0 to 3 on one and two ranks: one arithmetic, and a resume that changes the number of ranks."""

import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from drafthead.drafters.trained import best_checkpoint
from drafthead.exporting.export import export_head
from tests.rounding import assert_same_losses, assert_same_norms, assert_same_weights
from tests.scripts import free_port, start
from tests.training.launching import checkpoints, command, entries, forget_after, losses, run

pytestmark = pytest.mark.slow

TWO_PER_STEP = ("train.batches_per_step=2", "train.keep_checkpoints=3", "train.temperature=1")
# The longest sums of a step: over three layers of 192 in fc, and over 96 tokens at three positions of two batches.
TERMS, RATE = 3 * 192, 3e-3


@pytest.fixture(scope="module")
def runs(run_factory):
    """Finished runs by (ZeRO stage, ranks), made when first asked for; each takes 9 steps of the same batches."""
    made = {}

    def get(stage: int, ranks: int):
        if (stage, ranks) not in made:
            recipe = run_factory(f"zero{stage}x{ranks}")
            run(recipe, *TWO_PER_STEP, f"train.zero_stage={stage}", ranks=ranks)
            made[stage, ranks] = recipe
        return made[stage, ranks]

    return get


def takes_the_steps_of(recipe, reference) -> None:
    """The same losses, norms of gradients, and exported head."""
    weights = load_file(best_checkpoint(reference.run_dir) / "model.safetensors")
    assert_same_losses(losses(recipe.run_dir), losses(reference.run_dir), TERMS)
    assert_same_norms(norms(recipe.run_dir), norms(reference.run_dir), TERMS, sum(t.numel() for t in weights.values()))
    exported = load_file(export_head(recipe, serve_check=False) / "model.safetensors")
    assert_same_weights(exported, weights, TERMS, 9, RATE)


def norms(run_dir) -> list[float]:
    return [entry["grad_norm"] for entry in entries(run_dir)]


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_every_stage_takes_the_same_steps_also_resumed_on_another_number_of_ranks(
    runs, run_factory, monkeypatch, stage, ranks
):
    finished, other = runs(stage, ranks), 3 - ranks
    monkeypatch.delattr(torch, "load")  # what opens DeepSpeed's pickles: an export does not
    takes_the_steps_of(finished, runs(0, 1))
    recipe = run_factory(f"resumed{stage}x{ranks}")
    shutil.copytree(finished.run_dir, recipe.run_dir)  # other tests look at the finished one
    forget_after(recipe.run_dir, 4)
    printed = run(recipe, *TWO_PER_STEP, f"train.zero_stage={stage}", ranks=other)
    assert f"resuming from step 4 (written by {ranks} ranks, now {other})" in printed
    takes_the_steps_of(recipe, finished)
    assert not list((recipe.run_dir / "checkpoints").glob(".*"))  # the converted copy is gone


def test_losses_are_those_of_one_rank_at_the_recipes_temperature_too(run_factory):
    losses_by_ranks = []
    for stage, ranks in ((0, 1), (1, 2)):
        recipe = run_factory(f"cold{stage}x{ranks}")
        run(recipe, *TWO_PER_STEP, f"train.zero_stage={stage}", "train.temperature=0.7", ranks=ranks)
        losses_by_ranks.append(losses(recipe.run_dir))
    assert_same_losses(*losses_by_ranks, TERMS)


@pytest.mark.parametrize("kind", ["peagle", "dspark"])
def test_every_drafter_trains_in_shards_and_resumes_on_another_number_of_ranks(run_factory, kind):
    head = (f"head.type={kind}", "head.mask_token_id=9", "head.num_draft_positions=3", "head.num_layers=2")
    options = (*TWO_PER_STEP, *head)
    plain, sharded = run_factory(f"{kind}0x1"), run_factory(f"{kind}3x2")
    run(plain, *options, "train.zero_stage=0", ranks=1)
    run(sharded, *options, "train.zero_stage=3", ranks=2)
    assert_same_losses(losses(sharded.run_dir), losses(plain.run_dir), TERMS)
    undisturbed = losses(sharded.run_dir)
    before, *_, after = (entry["acceptance_length"] for entry in entries(sharded.run_dir, "validation"))
    assert after > before  # P-EAGLE: by loss up to the first rejected draft
    forget_after(sharded.run_dir, 4)
    printed = run(sharded, *options, "train.zero_stage=3", ranks=1)
    assert "resuming from step 4 (written by 2 ranks, now 1)" in printed
    assert_same_losses(losses(sharded.run_dir), undisturbed, TERMS)
    weights = (load_file(checkpoints(recipe.run_dir)[-1] / "model.safetensors") for recipe in (plain, sharded))
    assert_same_weights(*weights, TERMS, len(undisturbed), RATE)


def test_gradients_sent_during_the_backward_are_the_same(runs, run_factory):
    """As on CUDA, where DeepSpeed overlaps the two."""
    recipe = run_factory("overlapping")
    run(recipe, *TWO_PER_STEP, "train.zero_stage=1", ranks=2, script="tests/training/overlapping.py")
    plain = runs(1, 2).run_dir
    assert_same_losses(losses(recipe.run_dir), losses(plain), TERMS)
    parameters = sum(t.numel() for t in load_file(checkpoints(plain)[-1] / "model.safetensors").values())
    assert_same_norms(norms(recipe.run_dir), norms(plain), TERMS, parameters)


@pytest.mark.long
def test_two_launchers_train_as_two_nodes(runs, run_factory):
    recipe = run_factory("nodes")
    flags = ("--multi_gpu", "--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1",
             "--main_process_port", str(free_port()), "--mixed_precision", "fp16")  # fmt: skip  # the recipe's is used
    commands = [command(recipe, *TWO_PER_STEP, flags=(*flags, "--machine_rank", str(rank))) for rank in range(2)]
    nodes = [start(*c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in commands]
    errors = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert_same_losses(losses(recipe.run_dir), losses(runs(1, 2).run_dir), TERMS)  # of more threads each
