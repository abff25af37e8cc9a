"""Plans: exact once the responses exist, of typical lengths before, and hours only for a rate of the user's."""

import pytest

from drafthead.config import load_recipe
from drafthead.generation.prompts import make_prompts
from drafthead.planning import Assumed
from drafthead.planning.stages import amount_of, plan_stages, states_bytes
from drafthead.target.spec import load_target_spec
from tests.artifacts import response, write_response_artifact
from tests.generation.small import small_recipe
from tests.scripts import run_here


def with_responses(tmp_path, *overrides: str, lengths=((5, 3), (7, 2), (1, 4))):
    """A recipe with responses of these lengths (prompt, response) in both splits."""
    recipe = small_recipe(tmp_path, "head.num_ttt_steps=4", *overrides)
    for split in ("train", "validation"):
        write_response_artifact(recipe.responses_dir(split), [response(str(i), *n) for i, n in enumerate(lengths)])
    return recipe


def plan_of(stage, recipe, **assumed):
    (plan,) = plan_stages(recipe, Assumed(**assumed), [stage])
    return plan


@pytest.mark.parametrize(
    ("overrides", "per_token", "per_row", "rows"),
    [
        ((), 3 * 192 * 2, 192 * 2, 12),
        (("states.format=fp8", "target.aux_layer_ids=[2,8]"), 2 * (192 + 4), 192 * 2, 12),
        (("target.aux_layer_ids=[2,8]",), 2 * 192 * 2, 0, 12),
        (("states.prompt_loss=0.5",), 3 * 192 * 2, 192 * 2, 18),  # of 13 tokens of prompts
    ],
    ids=[
        "bf16",
        "fp8 has a scale per token",
        "an aux layer on the last boundary is not stored twice",
        "half the prompt",
    ],
)
def test_tokens_and_bytes_are_those_counted_by_hand(overrides, per_token, per_row, rows, tmp_path):
    # 8 + 9 + 5 tokens with id and mask, 4 + 3 + 5 rows with argmax and lse
    recipe = with_responses(tmp_path, "states.prompt_loss=0", *overrides)
    amount = amount_of(recipe, "train", Assumed())
    assert (amount.note, amount.sequences, amount.tokens) == ("", 3, 22)
    spec = load_target_spec(recipe.target_path)
    assert states_bytes(recipe, spec, amount, "train") == 22 * (per_token + 5) + rows * (per_row + 8)
    assert amount_of(recipe, "validation", Assumed()).tokens == 22 + 3 * 16


def test_a_spool_harvests_every_epoch_and_holds_few_shards(tmp_path):
    options = ("states.sequences_per_shard=1", "train.epochs=3")
    whole, online = (
        plan_of("harvest", with_responses(tmp_path / name, *options, *more))
        for name, more in (("whole", ()), ("online", ("states.spool_shards=2",)))
    )
    assert online.tokens == whole.tokens + 2 * 22
    assert online.disk_bytes < whole.disk_bytes


@pytest.mark.parametrize(
    ("max_train", "prompts"),
    [("null", 402), ("90", 90)],
)
def test_before_there_are_prompts_recipe_and_command_line_give_their_number(max_train, prompts, tmp_path):
    mix = "prompts.sources=[{name: a, train: 300}, {name: b, train: {x: 100, y: 50}}]"
    options = ("prompts.path=null", "prompts.validation=48", f"prompts.max_train={max_train}")
    recipe = small_recipe(tmp_path, mix, *options)
    assert amount_of(recipe, "train", Assumed()).sequences == prompts
    assert amount_of(recipe, "validation", Assumed()).sequences == recipe.prompts.validation
    amount = amount_of(recipe, "train", Assumed(prompts=5, prompt_tokens=100, response_tokens=20))
    assert (amount.sequences, amount.prompt, amount.generated) == (5, 5 * 100, 5 * 20)


def test_a_recipe_without_training_prompts_has_no_plan(tmp_path):
    mix = ("prompts.path=null", "prompts.sources=[{name: a, train: 40}]", "prompts.validation=48")
    with pytest.raises(ValueError, match=r"prompts\.validation 48 leaves no prompt"):
        plan_of("acceptance", small_recipe(tmp_path, *mix))


def test_drawn_prompts_are_counted(tmp_path):
    recipe = small_recipe(tmp_path)
    counts = make_prompts(recipe)["counts"]
    amount = amount_of(recipe, "train", Assumed(prompt_tokens=10))
    assert amount.sequences >= counts["train"]  # turns of a chat
    assert amount.prompt == amount.sequences * 10
    assert amount.generated == amount.sequences * recipe.responses.max_tokens, "an upper bound"
    assert str(recipe.responses.max_tokens) in amount.note


def test_acceptance_answers_every_held_out_prompt_under_every_condition(tmp_path):
    methods = ("eval.methods=[head,ngram]", "eval.num_draft_tokens=[3,5]", "eval.temperatures=[0,0.7]")
    recipe = with_responses(tmp_path, *methods, "eval.max_tokens=2")
    # baseline twice at 0 and once at 0.7; head and n-gram at two K and two temperatures; sampled drafts at 0.7
    passes = 2 + 1 + 2 * 2 * 2 + 2
    heldout = make_prompts(recipe)["counts"]["heldout"]
    plan = plan_of("acceptance", recipe, gpus=4)
    assert plan.tokens == passes * heldout * 2, "responses of 3 tokens in the mean are cut at eval.max_tokens"
    assert plan.work.startswith(f"{passes * heldout:,} responses")
    assert plan.notes == [""]
    assert plan.hours(1) == pytest.approx(plan.tokens / 4 / 3600)
    assert plan.memory_bytes > plan_of("regenerate", recipe).memory_bytes, "the head is loaded too"


@pytest.mark.parametrize(
    ("sources", "prompts", "noted"),
    [("[{name: a, train: 300, heldout: 40}]", 40, False), ("[{name: a, train: 300}]", 2_400, True)],
)
def test_held_out_prompts_are_the_recipes_or_assumed(sources, prompts, noted, tmp_path):
    recipe = small_recipe(tmp_path, "prompts.path=null", "prompts.max_heldout=null", f"prompts.sources={sources}",
                          "eval.methods=[head]", "prompts.validation=8")  # fmt: skip
    plan = plan_of("acceptance", recipe)
    assert plan.work.startswith(f"{3 * prompts:,} responses")
    assert ("held-out prompts are assumed" in plan.notes[0]) == noted


def test_what_does_not_fit_is_noted(tmp_path):
    recipe = with_responses(tmp_path)
    for stage in ("regenerate", "harvest", "train", "acceptance"):
        assert not any("do not fit" in note for note in plan_of(stage, recipe).notes)
        assert any("do not fit" in note for note in plan_of(stage, recipe, gpu_memory_gib=2 / 1024).notes)


@pytest.mark.parametrize(
    ("script", "flag", "value", "named"),
    [
        ("data_gen/dry_run.py", "--prompts", "0", "prompts"),
        ("data_gen/dry_run.py", "--train-rate", "-1", "positive value: '-1'"),
        ("data_gen/harvest.py", "--tokens-per-second", "nan", "positive value: 'nan'"),
    ],
)
def test_what_is_assumed_is_positive(script, flag, value, named, capsys):
    assert run_here(script, flag, value) == 2  # argparse's
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "code", "printed"), [("--dry-run", 0, "22 tokens"), ("--verify", 1, "train")])
def test_the_script_runs_neither_model_nor_harvest(tmp_path, capsys, flag, code, printed):
    recipe = with_responses(tmp_path)
    assert run_here("data_gen/harvest.py", flag, f"output_dir={tmp_path}") == code
    assert printed in capsys.readouterr().out
    assert not recipe.states_dir("train").exists()


def test_work_that_the_gpus_cannot_share_is_refused(tmp_path):
    recipe = load_recipe(overrides=[f"output_dir={tmp_path}", "train.batches_per_step=4"])
    assert plan_of("train", recipe, gpus=2).gpus == 2
    with pytest.raises(ValueError, match=r"batches_per_step 4 .* 3 ranks"):
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
    assert [stage in printed for stage in ("regenerate", "harvest", "train", "acceptance")] == [True] * 4
    assert printed.count("1.00 │") == 1
