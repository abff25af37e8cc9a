"""Plans: exact once the responses exist, an upper bound before, and hours only for a rate of the user's."""

import pytest
import torch

from drafthead.config import load_recipe
from drafthead.engine.capture.shard_writer import ShardSlot
from drafthead.generation.prompts import make_prompts
from drafthead.planning import Assumed
from drafthead.planning.lengths import SplitLengths, all_lengths
from drafthead.planning.stages import plan_stages, states_bytes
from drafthead.target.pieces import load_target_spec
from tests.artifacts import response, write_response_artifact
from tests.engine.slots import writer_of
from tests.generation.small import small_recipe
from tests.scripts import run_here


def with_responses(tmp_path, *overrides: str, lengths=((5, 3, 0), (7, 0, 0), (1, 4, 2))):
    """A recipe with responses of these lengths (prompt, response, continuation) in both splits."""
    recipe = small_recipe(tmp_path, *overrides)
    for split in ("train", "validation"):
        write_response_artifact(recipe.responses_dir(split), [response(str(i), *n) for i, n in enumerate(lengths)])
    return recipe


def plan_of(stage, recipe, **assumed):
    (plan,) = plan_stages(recipe, Assumed(**assumed), [stage])
    return plan


def test_rows_are_those_that_the_store_keeps(tmp_path):
    for lengths in ((5, 3, 0), (7, 0, 0), (1, 4, 2), (0, 3, 1)):
        writer, (prompt, generated, _) = writer_of(2), lengths
        planned = SplitLengths("train", torch.tensor([lengths]).numpy())
        rows = torch.randn(planned.total, 2, 4)
        writer.add(ShardSlot(str(tmp_path), 0, 0, 2, "x", prompt, generated), torch.zeros(planned.total), rows)
        (held,) = writer._pending.values()
        assert len(held[0].result().argmax) == planned.rows[0]
        writer.close()


@pytest.mark.parametrize(
    ("overrides", "per_token", "per_row"),
    [
        ((), 3 * 192 * 2, 192 * 2),
        (("states.format=fp8", "target.aux_layer_ids=[2,8]"), 2 * (192 + 4), 192 * 2),
        (("target.aux_layer_ids=[2,8]",), 2 * 192 * 2, 0),
    ],
    ids=["bf16", "fp8 has a scale per token", "an aux layer on the last boundary is not stored twice"],
)
def test_tokens_and_bytes_are_those_counted_by_hand(overrides, per_token, per_row, tmp_path):
    # 8 + 7 + 7 tokens with id and mask, 4 + 0 + 7 rows with argmax and lse
    recipe = with_responses(tmp_path, *overrides)
    for lengths in all_lengths(recipe, Assumed()):
        assert (lengths.note, len(lengths.parts), lengths.total) == ("", 3, 22)
        stored = states_bytes(recipe, load_target_spec(recipe.target_path), lengths)
        assert stored == 22 * (per_token + 5) + 11 * (per_row + 8)


def test_a_spool_harvests_every_epoch_and_holds_few_shards(tmp_path):
    options = ("states.spool_shards=2", "states.sequences_per_shard=1", "train.epochs=3")
    recipe = with_responses(tmp_path, *options)
    spec = load_target_spec(recipe.target_path)
    train, validation = (states_bytes(recipe, spec, lengths) for lengths in all_lengths(recipe, Assumed()))
    assert train < validation
    assert plan_of("harvest", recipe).tokens == 3 * 22 + 22


@pytest.mark.parametrize(
    ("settings", "prompts"),
    [
        (("preset=standard", "validation=500"), 82_000),
        (("preset=standard", "max_train=9000"), 9_000),
        (("sources=[{name: a, train: 300}, {name: b, train: {x: 100, y: 50}}]", "validation=48"), 402),
    ],
)
def test_before_there_are_prompts_recipe_and_command_line_give_their_number(settings, prompts, tmp_path):
    overrides = ("path=null", "max_train=null", "max_heldout=null", *settings)
    recipe = small_recipe(tmp_path, *(f"prompts.{override}" for override in overrides))
    train, validation = all_lengths(recipe, Assumed())
    assert (len(train.parts), len(validation.parts)) == (prompts, recipe.prompts.validation)
    train, validation = all_lengths(recipe, Assumed(prompts=5, prompt_tokens=100, response_tokens=20))
    assert (len(train.parts), train.total) == (5, 5 * 120)
    assert validation.parts[0].tolist() == [100, 20, recipe.head.num_positions]


def test_the_prompts_of_a_file_are_counted_before_they_are_drawn(tmp_path):
    recipe = small_recipe(tmp_path, "prompts.max_train=null")
    planned = all_lengths(recipe, Assumed())
    assert not list(tmp_path.iterdir())
    counts = make_prompts(recipe)["counts"]
    for before, drawn in zip(planned, all_lengths(recipe, Assumed()), strict=True):
        assert len(before.parts) == counts[before.split]
        assert before.parts.tolist() == drawn.parts.tolist()
    train = planned[0]
    assert (train.parts[:, 1] == recipe.responses.max_tokens).all(), "an upper bound"
    assert str(recipe.responses.max_tokens) in train.note


def test_hours_come_from_a_given_rate_and_are_shared_by_engines(tmp_path):
    recipe = with_responses(tmp_path)
    one, four = (plan_of("harvest", recipe, gpus=n) for n in (1, 4))
    assert one.hours(None) is None
    assert one.hours(1) == pytest.approx(44 / 3600)
    assert four.hours(1) == pytest.approx(11 / 3600)


def test_what_does_not_fit_is_noted(tmp_path):
    recipe = with_responses(tmp_path, "states.one_pass=true")
    for stage in ("regenerate", "harvest", "train"):
        assert not any("do not fit" in note for note in plan_of(stage, recipe).notes)
        assert any("do not fit" in note for note in plan_of(stage, recipe, gpu_memory_gib=2 / 1024).notes)
    assert any("host memory" in note for note in plan_of("harvest", recipe).notes)


@pytest.mark.parametrize("option", [("--prompts", "0"), ("--response-tokens", "-5"), ("--gpu-memory-gib", "0")])
def test_what_is_assumed_is_positive(option, capsys):
    assert run_here("data_gen/dry_run.py", *option) == 2
    assert option[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "code", "printed"), [("--dry-run", 0, "22 tokens"), ("--verify", 1, "train")])
def test_the_script_runs_neither_model_nor_harvest(tmp_path, capsys, flag, code, printed):
    recipe = with_responses(tmp_path)
    assert run_here("data_gen/harvest.py", flag, f"output_dir={tmp_path}") == code
    assert printed in capsys.readouterr().out
    assert not recipe.states_dir("train").exists()


def test_work_that_the_gpus_cannot_share_is_refused(tmp_path):
    recipe = load_recipe(overrides=[f"output_dir={tmp_path}", "train.batches_per_step=4"])
    assert plan_of("train", recipe, gpus=2).gpus == 2
    with pytest.raises(ValueError, match=r"batches_per_step 4 .* 3 GPUs"):
        plan_of("train", recipe, gpus=3)
    with pytest.raises(ValueError, match=r"--gpus 3 .*tensor_parallel_size 2"):
        plan_of("harvest", load_recipe(overrides=["engine.tensor_parallel_size=2"]), gpus=3)


def test_a_vocabulary_still_to_be_chosen_is_counted_whole():
    plan = plan_of("train", load_recipe(overrides=["head.draft_vocab_size=0", "head.coverage=0.98"]))
    assert plan.disk_bytes > plan_of("train", load_recipe()).disk_bytes
    assert "head.coverage" in plan.notes[-1]


def test_a_rate_on_the_command_line_is_that_of_its_stage(tmp_path, capsys):
    recipe = with_responses(tmp_path, "train.epochs=5")
    rate = recipe.train.epochs * 22 / 3600
    assert run_here("data_gen/dry_run.py", "--train-rate", str(rate), "train.epochs=5", f"output_dir={tmp_path}") == 0
    printed = capsys.readouterr().out
    assert [stage in printed for stage in ("regenerate", "harvest", "train")] == [True] * 3
    assert printed.count("1.00 │") == 1
