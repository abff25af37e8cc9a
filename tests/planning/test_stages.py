"""Plans: exact once the responses exist, an upper bound before, and hours only for a rate of the user's."""

import pytest
import torch

from data_gen.dry_run import all_stages
from drafthead.config import PromptsConfig, load_recipe
from drafthead.engine.capture.shard_writer import ShardSlot
from drafthead.generation.prompts import make_prompts
from drafthead.planning import Assumed, print_plans
from drafthead.planning.lengths import SequenceLength, all_lengths, planned
from drafthead.planning.memory import EngineMemory
from drafthead.planning.stages import harvest_plan, regenerate_plan, states_bytes, train_plan
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


def test_rows_are_those_that_the_store_keeps(tmp_path):
    for prompt, generated, after in ((5, 3, 0), (7, 0, 0), (1, 4, 2), (0, 3, 1)):
        writer, length = writer_of(2), SequenceLength(prompt, generated, after)
        rows = torch.randn(length.tokens, 2, 4)
        writer.add(ShardSlot(str(tmp_path), 0, 0, 2, "x", prompt, generated), torch.zeros(length.tokens), rows)
        (held,) = writer._pending.values()
        assert len(held[0].result().argmax) == length.rows
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
        assert (lengths.exact, len(lengths.sequences), lengths.tokens) == (True, 3, 22)
        stored = states_bytes(recipe, load_target_spec(recipe.target_path), lengths)
        assert stored == 22 * (per_token + 5) + 11 * (per_row + 8) + 4 * 16


def test_a_spool_harvests_every_epoch_and_holds_few_shards(tmp_path):
    options = ("states.spool_shards=2", "states.sequences_per_shard=1", "train.epochs=3")
    recipe = with_responses(tmp_path, *options)
    spec, rate = load_target_spec(recipe.target_path), Assumed(tokens_per_second=1)
    train, validation = (states_bytes(recipe, spec, lengths) for lengths in all_lengths(recipe, rate))
    assert train < validation
    assert harvest_plan(recipe, rate).hours == pytest.approx((3 * 22 + 22) / 3600)


def test_without_prompts_the_recipe_and_the_command_line_give_their_number(tmp_path):
    recipe = small_recipe(tmp_path)
    train, validation = all_lengths(recipe, Assumed(prompts=5, prompt_tokens=100, response_tokens=20))
    assert (len(train.sequences), train.tokens) == (5, 5 * 120)
    assert validation.tokens == 4 * (120 + recipe.head.num_positions)
    train, _ = all_lengths(recipe, Assumed())
    assert (len(train.sequences), train.exact) == (recipe.prompts.max_train, False)


@pytest.mark.parametrize(
    ("settings", "prompts"),
    [
        ({"preset": "standard", "validation": 500}, 82_000),
        ({"preset": "standard", "max_train": 9_000}, 9_000),
        ({"sources": [{"name": "a", "train": 300}, {"name": "b", "train": {"x": 100, "y": 50}}]}, 402),
        ({"path": "x.jsonl", "max_train": 70}, 70),
        ({"path": "x.jsonl"}, 100_000),
    ],
)
def test_planned_prompts_are_those_of_the_sources(settings, prompts):
    assert planned(PromptsConfig(**settings), "train") == prompts


def test_before_the_responses_everything_is_an_upper_bound(tmp_path):
    recipe = small_recipe(tmp_path)
    make_prompts(recipe)
    train, validation = all_lengths(recipe, Assumed())
    assert not train.exact
    assert train.tokens > len(train.sequences) * recipe.responses.max_tokens
    assert len(validation.sequences) == 4
    shorter, _ = all_lengths(recipe, Assumed(response_tokens=8))
    assert shorter.tokens == train.tokens - len(train.sequences) * (recipe.responses.max_tokens - 8)
    assert any("responses.max_tokens" in note for note in harvest_plan(recipe, Assumed()).notes)


def test_one_pass_takes_memory_of_the_host_instead_of_a_gpu(tmp_path):
    recipe = small_recipe(tmp_path, "states.one_pass=true")
    make_prompts(recipe)
    rate = Assumed(tokens_per_second=1)
    plan = harvest_plan(recipe, rate)
    assert (plan.gpus, plan.hours) == (0, None)
    assert any("responses.prompts_per_part 8" in note for note in plan.notes)
    answered = with_responses(tmp_path / "answered", "states.one_pass=true")  # what lacks states is harvested
    assert harvest_plan(answered, rate).hours is not None


def test_hours_come_from_a_given_rate_and_are_shared_by_engines(tmp_path):
    recipe = with_responses(tmp_path)
    assert harvest_plan(recipe, Assumed()).hours is None
    one, four = (harvest_plan(recipe, Assumed(gpus=n, tokens_per_second=1)) for n in (1, 4))
    assert one.hours == pytest.approx(44 / 3600)
    assert four.hours == pytest.approx(one.hours / 4)


def test_weights_that_do_not_fit_are_noted():
    recipe, small = load_recipe(), 2 / 1024  # the embedded target's weights take a few MiB
    assert EngineMemory(recipe, 1).notes(100) == ()
    (note,) = EngineMemory(recipe, small).notes(100)
    assert "engine.tensor_parallel_size 1" in note
    assert note in regenerate_plan(recipe, Assumed(prompts=3, gpu_memory_gib=small)).notes


@pytest.mark.parametrize(
    ("name", "value"), [("tokens_per_second", -1.0), ("prompts", 0), ("response_tokens", -5), ("gpu_memory_gib", 0)]
)
def test_what_is_assumed_is_positive(name, value):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {value:g}"):
        Assumed(**{name: value})


@pytest.mark.parametrize(
    ("flag", "code", "printed"), [("--dry-run", 0, "3 sequences, 22 tokens"), ("--verify", 1, "train")]
)
def test_the_script_runs_neither_model_nor_harvest(tmp_path, capsys, flag, code, printed):
    recipe = with_responses(tmp_path)
    assert run_here("data_gen/harvest.py", flag, f"output_dir={tmp_path}") == code
    assert printed in capsys.readouterr().out
    assert not recipe.states_dir("train").exists()


def test_a_step_is_shared_by_the_ranks_or_refused(tmp_path):
    recipe = load_recipe(overrides=[f"output_dir={tmp_path}", "train.batches_per_step=4"])
    plan = train_plan(recipe, Assumed(gpus=2))
    assert plan.gpus == 2
    assert plan.notes[0].startswith("a step: 2 ")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"batches_per_step 4 .* 3 GPUs"):
        train_plan(recipe, Assumed(gpus=3))


def test_a_vocabulary_still_to_be_chosen_is_counted_whole():
    plan = train_plan(load_recipe(overrides=["head.draft_vocab_size=0", "head.coverage=0.98"]), Assumed())
    assert plan.disk_bytes > train_plan(load_recipe(), Assumed()).disk_bytes
    assert "head.coverage" in plan.notes[-1]


def test_the_table_of_all_stages_has_their_sum(tmp_path, capsys):
    recipe = load_recipe(overrides=[f"output_dir={tmp_path}"])
    plans = all_stages(recipe, Assumed(prompts=360, prompt_tokens=500, response_tokens=100), {"train": 1000.0})
    hours = 360 * 600 * recipe.train.epochs / 1000 / 3600
    assert [plan.hours for plan in plans] == [None, None, None, pytest.approx(hours), None, None]
    print_plans(plans, "title")
    printed = capsys.readouterr().out
    assert "regenerate, harvest: no prompts yet" in printed
    assert printed.count(f"{hours:.2f} │") == 2, "of the stage, and of all"
    assert not list(tmp_path.iterdir())


def test_a_rate_on_the_command_line_is_that_of_its_stage(tmp_path, capsys):
    rate = ("--train-rate", "1000", "--prompts", "360", "--prompt-tokens", "500", "--response-tokens", "100")
    assert run_here("data_gen/dry_run.py", *rate, "train.epochs=5", f"output_dir={tmp_path}") == 0
    assert capsys.readouterr().out.count("0.30 │") == 2
