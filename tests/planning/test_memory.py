"""The memory that a dry run announces, against the memory that a step takes."""

import pytest
import torch

from drafthead.config import load_recipe
from drafthead.data.packing import window_tokens
from drafthead.drafters.base import DraftShape, num_parameters
from drafthead.drafters.batch import PackedBatch, tail_layout
from drafthead.drafters.registry import drafter_of, parse_head
from drafthead.planning.memory import EngineMemory, training_memory
from drafthead.target.pieces import FrozenTarget
from drafthead.target.spec import model_config
from drafthead.training.accelerator import bucket_elements, deepspeed_config
from drafthead.training.trainer import LossModule

TOKENS, STEPS = 1024, 3
BF16 = {"precision": "bf16", "zero_stage": 1}


def shape(kind: str = "eagle3", **further_keys: float) -> DraftShape:
    steps: dict = {"num_ttt_steps": STEPS, **further_keys}
    if kind != "eagle3":  # the last layer computes no known token, and announcements forget it
        steps = {"num_draft_positions": STEPS, "mask_token_id": 9, "num_layers": 4}
    if kind == "dspark":
        steps["markov_rank"] = 16  # a small part of H, as in a large head
    sizes = {"intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    head = parse_head({"type": kind, "draft_vocab_size": 4096, **sizes, **steps})
    return DraftShape(head, 256, 8192, 3, 1e-5, {"rope_type": "default", "rope_theta": 1e4}, 2 * TOKENS)


def config(**changed):
    options = {"tokens_per_batch": TOKENS, "precision": "fp32", "zero_stage": 0, "optimizer": "adamw", **changed}
    return load_recipe(overrides=[f"train.{key}={value}" for key, value in options.items()]).train


def kept_by_the_unroll(
    recompute: bool,
    tokens: int = TOKENS,
    first: int = 0,
    kind: str = "eagle3",
    dtype=torch.float32,
    **further_keys: float,
) -> int:
    """Bytes that autograd holds on to between forward and backward, each storage once, but for weights and inputs.

    Args:
        recompute: whether steps are recomputed.
        tokens: tokens of one window.
        first: first row of the window with loss.
        kind: type of the drafter.
        dtype: type that the head computes in.
        further_keys: further keys of its head.
    """
    torch.manual_seed(0)
    sizes = shape(kind, **further_keys)
    drafter = drafter_of(sizes.head)
    module = LossModule(drafter.MODULE(sizes)).to(dtype)
    module.draft.recompute = recompute
    H, V, D = sizes.hidden_size, sizes.vocab_size, sizes.head.draft_vocab_size
    pieces = (part.to(dtype) for part in (torch.randn(V, H), torch.ones(H), torch.randn(D, H)))
    target = FrozenTarget(*pieces, 1e-5, torch.arange(D))
    rows, ones = tokens - first, torch.ones(tokens - first, dtype=torch.bool)
    batch = PackedBatch(
        layout=tail_layout([tokens], [first]), input_ids=torch.randint(0, V, (tokens,)),
        positions=torch.arange(tokens), aux=torch.randn(tokens, 3 * H), last_hidden=torch.randn(rows, H),
        loss_mask=ones, scored=drafter.loss_rows(ones), of_row=torch.arange(rows),
        argmax=torch.zeros(rows, dtype=torch.long), lse=torch.full((rows,), 20.0),
    )  # fmt: skip
    with torch.profiler.profile(profile_memory=True) as profile:
        scored = module(batch.cast(dtype), target, torch.ones(STEPS))
    events = profile.profiler.kineto_results.events()
    del scored
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


HEAD_GRADIENT = 4 * 4096 * 256  # formed in the forward, and announced with the loss


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_what_the_unroll_keeps_is_what_is_announced(kind):
    announced = training_memory(shape(kind), config(), ranks=1, device="cpu")
    assert kept_by_the_unroll(False, kind=kind) - HEAD_GRADIENT == pytest.approx(announced["activations"], rel=0.15)


@pytest.mark.parametrize(("dtype", "training"), [(torch.float32, {}), (torch.bfloat16, BF16)])
def test_what_features_keep_is_announced(dtype, training):
    (without, plain), (learned, announced) = (
        (
            kept_by_the_unroll(False, dtype=dtype, **further_keys),
            training_memory(shape(**further_keys), config(**training), ranks=1, device="cpu"),
        )
        for further_keys in ({}, {"feature_weight": 0.1})
    )
    assert learned - without == pytest.approx(announced["activations"] - plain["activations"], rel=0.05)


def test_recomputed_steps_keep_less_and_no_more_than_announced():
    """One step at a time is made again in the backward: announced, but not yet there after the forward."""
    plain, recomputed = (
        training_memory(shape(), config(gradient_checkpointing=on), ranks=1, device="cpu") for on in (False, True)
    )
    measured = kept_by_the_unroll(True) - HEAD_GRADIENT
    assert measured < recomputed["activations"] < plain["activations"]
    assert measured > 0.5 * recomputed["activations"]


def test_a_window_with_its_context_keeps_less_than_a_batch_of_rows():
    window = window_tokens(TOKENS, TOKENS // 2)
    assert window == 2 * TOKENS
    assert kept_by_the_unroll(False, window, window - TOKENS // 2) < kept_by_the_unroll(False)
    documents = [training_memory(shape(), config(), ranks=1, longest=n)["batch"] for n in (TOKENS, window, 9 * TOKENS)]
    assert documents == [documents[0], 2 * documents[0], 2 * documents[0]]


def test_more_gpus_than_key_value_heads_hold_them_twice():
    heads = model_config(load_recipe()).num_key_value_heads
    one, each, twice = (
        EngineMemory(load_recipe(overrides=[f"engine.tensor_parallel_size={gpus}"])) for gpus in (1, heads, 2 * heads)
    )
    assert one.cache_bytes(100) == heads * each.cache_bytes(100)
    assert twice.cache_bytes(100) == each.cache_bytes(100)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_cuts_up_what_it_says(stage):
    alone, shared = (training_memory(shape(), config(zero_stage=stage, precision="bf16"), ranks) for ranks in (1, 4))
    assert shared["optimizer"] == pytest.approx(alone["optimizer"] / 4, rel=1e-3)
    assert (shared["gradients"] < alone["gradients"]) == (stage >= 2)
    assert (shared["weights"] < alone["weights"] / 3.9) == (stage == 3)
    assert shared["activations"] == alone["activations"]
    told = deepspeed_config(config(zero_stage=stage, precision="bf16"), torch.nn.Linear(2, 2))
    assert (told["zero_optimization"]["stage"], told["bf16"]["enabled"]) == (stage, True)


def test_buckets_overlap_and_are_announced(monkeypatch):
    """On CUDA DeepSpeed holds two buckets; one that takes all parameters would leave nothing to overlap."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with torch.device("meta"):
        model = torch.nn.Linear(20_000, 15_000)  # about as many weights as gpt-oss-120b's head
    zero = deepspeed_config(config(precision="bf16", zero_stage=1), model)["zero_optimization"]
    assert zero["overlap_comm"]
    assert zero["reduce_bucket_size"] == bucket_elements(300_015_000) <= 300_015_000 / 5
    announced = training_memory(shape(), config(precision="bf16", zero_stage=1), ranks=1)
    assert announced["buckets"] == 2 * 2 * bucket_elements(num_parameters(shape()))
    assert training_memory(shape(), config(), ranks=1, device="cpu")["buckets"] == 0
