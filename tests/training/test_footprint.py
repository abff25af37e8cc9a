"""The memory that a dry run announces, against the memory that a step takes."""

import pytest
import torch

from benchmarks.stepbench.shapes import Shape, step_flops
from drafthead.config import HeadConfig, load_recipe
from drafthead.data.packing import PackedBatch
from drafthead.drafters.base import DraftShape
from drafthead.drafters.batch import tail_layout
from drafthead.drafters.eagle3.alignment import valid_positions
from drafthead.drafters.eagle3.model import DraftModel
from drafthead.stage_plan import Assumed
from drafthead.training.footprint import footprint
from drafthead.training.objective import FrozenTarget, TTTObjective, score
from drafthead.training.plan import TrainAmount, operations_per_epoch, print_plan, train_plan

TOKENS, STEPS = 1024, 3


def shape() -> DraftShape:
    head = HeadConfig(
        draft_vocab_size=4096, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, head_dim=32
    )
    return DraftShape(head, 256, 8192, 3, 1e-5, {"rope_type": "default", "rope_theta": 1e4}, 2 * TOKENS)


def config(**changed):
    options = {"num_ttt_steps": STEPS, "tokens_per_batch": TOKENS, "precision": "fp32", "zero_stage": 0, **changed}
    return load_recipe(overrides=[f"train.{key}={value}" for key, value in options.items()]).train


def kept_by_the_unroll(recompute: bool) -> int:
    """Bytes that autograd holds on to between forward and backward, each storage once, but for weights and inputs."""
    torch.manual_seed(0)
    sizes = shape()
    module = TTTObjective(DraftModel(sizes), STEPS, recompute=recompute)
    H, V, D = sizes.hidden_size, sizes.vocab_size, sizes.head.draft_vocab_size
    target = FrozenTarget(torch.randn(V, H), torch.ones(H), torch.randn(D, H), 1e-5, torch.arange(D))
    ones = torch.ones(TOKENS, dtype=torch.bool)
    batch = PackedBatch(
        ids=("a",), layout=tail_layout([TOKENS], [0]), input_ids=torch.randint(0, V, (TOKENS,)),
        positions=torch.arange(TOKENS), aux=torch.randn(TOKENS, 3 * H), last_hidden=torch.randn(TOKENS, H),
        loss_mask=ones, counted=ones, argmax=torch.zeros(TOKENS, dtype=torch.long), lse=torch.full((TOKENS,), 20.0),
    )  # fmt: skip
    valid = valid_positions(batch.loss_mask, batch.layout.cu_rows, STEPS)
    with torch.profiler.profile(profile_memory=True) as profile:
        scored = score(module, batch, target, valid, torch.ones(STEPS))
    events = profile.profiler.kineto_results.events()
    del scored
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


HEAD_GRADIENT = 4 * 4096 * 256  # formed in the forward, and announced with the loss


def test_what_the_unroll_keeps_is_what_is_announced():
    announced = footprint(shape(), config(), ranks=1, device="cpu")
    assert kept_by_the_unroll(False) - HEAD_GRADIENT == pytest.approx(announced.activations, rel=0.15)


def test_recomputed_steps_keep_less_and_no_more_than_announced():
    """One step at a time is made again in the backward: announced, but not yet there after the forward."""
    plain, recomputed = (
        footprint(shape(), config(gradient_checkpointing=on), ranks=1, device="cpu") for on in (False, True)
    )
    measured = kept_by_the_unroll(True) - HEAD_GRADIENT
    assert measured < recomputed.activations < plain.activations
    assert measured > 0.5 * recomputed.activations


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_cuts_up_what_it_says(stage):
    alone, shared = (footprint(shape(), config(zero_stage=stage, precision="bf16"), ranks) for ranks in (1, 4))
    assert shared.optimizer == pytest.approx(alone.optimizer / 4, rel=1e-3)
    assert (shared.gradients < alone.gradients) == (stage >= 2)
    assert (shared.weights < alone.weights / 3.9) == (stage == 3)
    assert shared.activations == alone.activations


def test_a_plan_is_printed_without_training(capsys, tmp_path):
    print_plan(load_recipe(overrides=[f"output_dir={tmp_path}", "train.batches_per_step=4"]), Assumed(gpus=2))
    printed = capsys.readouterr().out
    assert "2 micro batches of 4,096 tokens on each of 2 GPUs" in printed
    assert "there are no answers yet to count" in printed
    assert not list(tmp_path.iterdir())


def test_ranks_that_cannot_share_a_step_are_refused():
    with pytest.raises(ValueError, match=r"batches_per_step 4 cannot be shared by 3 GPUs"):
        print_plan(load_recipe(overrides=["train.batches_per_step=4"]), Assumed(gpus=3))


def test_a_vocabulary_still_to_be_chosen_is_counted_whole():
    recipe = load_recipe(overrides=["head.draft_vocab_size=0", "head.coverage=0.98"])
    plan = train_plan(recipe, Assumed(), None)
    assert plan.disk_bytes > train_plan(load_recipe(), Assumed(), None).disk_bytes
    assert "an upper bound" in plan.notes[-1]


def test_operations_are_those_of_the_benchmark():
    """A row of every token: the formula that benchmarks/ measures the peak with."""
    measured = Shape("x", 256, 1024, 8, 4, 32, vocab=8192, draft_vocab=4096, tokens=TOKENS, batch=2, ttt_steps=STEPS)
    by_hand = step_flops(measured)
    own = operations_per_epoch(shape(), STEPS, TrainAmount(2, 2 * TOKENS, 2 * TOKENS))
    assert own == pytest.approx(by_hand, rel=0.01)
