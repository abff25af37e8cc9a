"""The dry run: exact once the responses exist, an upper bound before, and no rate that nobody measured."""

import pytest
import torch

from drafthead.config import REPO_ROOT, Recipe
from drafthead.engine.capture.shard_writer import ShardSlot
from drafthead.engine.rates import MEASURED
from drafthead.generation.plans.estimate import estimate, harvest_plan, print_estimate
from drafthead.generation.plans.texts import Text
from drafthead.generation.prompts import make_prompts
from drafthead.stage_plan import Assumed
from tests.artefacts import response, write_response_artefact
from tests.engine.slots import writer_of
from tests.generation.small import small_recipe
from tests.recipes import changed
from tests.scripts import run_here


def with_responses(tmp_path, *overrides: str, lengths=((5, 3, 0), (7, 0, 0), (1, 4, 2))):
    """A recipe with responses of these lengths (prompt, response, continuation) in both splits."""
    recipe = small_recipe(tmp_path, *overrides)
    for split in ("train", "validation"):
        write_response_artefact(recipe.responses_dir(split), [response(str(i), *n) for i, n in enumerate(lengths)])
    return recipe


def never_measured(recipe: Recipe) -> Recipe:
    """The same target under a name that no measured rate has."""
    return changed(recipe, "target", path=str(REPO_ROOT / "data_gen/tiny/target"))


def test_rows_are_those_that_the_store_keeps(tmp_path):
    for prompt, answer, after in ((5, 3, 0), (7, 0, 0), (1, 4, 2), (0, 3, 1)):
        writer, text = writer_of(2), Text(prompt, answer, after)
        rows = torch.randn(text.tokens, 2, 4)
        writer.add(ShardSlot(str(tmp_path), 0, 0, 2, "x", prompt, answer), torch.zeros(text.tokens), rows)
        (held,) = writer._pending.values()
        assert len(held[0].result().argmax) == text.rows
        writer.close()


def test_tokens_and_bytes_are_those_counted_by_hand(tmp_path):
    # 8 + 7 + 7 tokens and 5 + 0 + 7 rows; three states of 192 in bf16, id and mask; last_hidden, argmax, lse per row
    (train, validation) = estimate(with_responses(tmp_path))
    assert (train.exact, train.sequences, train.tokens, train.passes) == (True, 3, 22, 1)
    assert train.disk_bytes == 22 * (3 * 192 * 2 + 5) + 12 * (192 * 2 + 8) + 4 * 16
    assert validation.disk_bytes == train.disk_bytes


def test_fp8_taps_cost_a_byte_and_a_scale(tmp_path):
    train, _ = estimate(with_responses(tmp_path, "states.format=fp8", "target.aux_layer_ids=[2,8]"))
    assert train.disk_bytes == 22 * (2 * (192 + 4) + 5) + 12 * (192 * 2 + 8) + 4 * 16


def test_a_tap_on_the_last_boundary_is_not_stored_twice(tmp_path):
    train, _ = estimate(with_responses(tmp_path, "target.aux_layer_ids=[2,8]"))
    assert train.disk_bytes == 22 * (2 * 192 * 2 + 5) + 12 * 8 + 4 * 16


def test_a_spool_harvests_every_epoch_and_holds_few_shards(tmp_path):
    options = ("states.spool_shards=2", "states.sequences_per_shard=1", "train.epochs=3")
    train, validation = estimate(with_responses(tmp_path, *options))
    assert (train.passes, validation.passes) == (3, 1)
    assert train.disk_bytes < validation.disk_bytes


def test_without_prompts_the_recipe_and_the_command_line_say_how_many(tmp_path):
    recipe = small_recipe(tmp_path)
    train, validation = estimate(recipe, Assumed(prompts=5, prompt_tokens=100, answer_tokens=20))
    assert (train.sequences, train.tokens) == (5, 5 * 120)
    assert validation.tokens == 4 * (120 + recipe.train.num_ttt_steps)
    train, _ = estimate(recipe)
    assert (train.sequences, train.exact) == (recipe.prompts.max_train, False)


def test_before_the_responses_everything_is_an_upper_bound(tmp_path, capsys):
    recipe = small_recipe(tmp_path)
    make_prompts(recipe)
    train, validation = estimate(recipe)
    assert not train.exact
    assert train.tokens > train.sequences * recipe.responses.max_tokens
    assert validation.sequences == 4
    shorter, _ = estimate(recipe, Assumed(answer_tokens=8))
    assert shorter.tokens == train.tokens - train.sequences * (recipe.responses.max_tokens - 8)
    print_estimate(recipe, Assumed())
    said = capsys.readouterr().out
    assert "at most" in said
    assert "every answer counted with responses.max_tokens 32" in said
    assert "price      not known: set eval.price_per_gpu_hour" in said


def test_one_pass_takes_memory_instead_of_hours(tmp_path, capsys):
    recipe = small_recipe(tmp_path, "states.one_pass=true")
    make_prompts(recipe)
    train, _ = estimate(recipe)
    assert train.kept_bytes == round(train.tokens * 8 / 12 * 4 * 192 * 2)  # 8 of 12 prompts; three aux layers and L
    print_estimate(recipe, Assumed())
    said = capsys.readouterr().out
    assert "responses.prompts_per_part 8 for less" in said
    assert " hours at " not in said
    answered = with_responses(tmp_path / "answered", "states.one_pass=true")  # what lacks states is harvested
    print_estimate(answered, Assumed())
    assert " hours at " in capsys.readouterr().out


def test_a_rate_is_given_measured_or_called_assumed(tmp_path, capsys):
    recipe = with_responses(tmp_path, "eval.price_per_gpu_hour=2")
    print_estimate(recipe, Assumed(tokens_per_second=0.01))
    said = capsys.readouterr().out
    assert "time       1.22 hours at 0 tokens/s (--tokens-per-second)" in said
    assert "price      2.44 at 2.00 per GPU and hour" in said
    assert harvest_plan(recipe, Assumed()).rate == str(MEASURED["data_gen/tiny/target"]["harvest"])

    elsewhere = harvest_plan(never_measured(recipe), Assumed(gpu="h200"))
    assert "ASSUMED, not measured" in elsewhere.rate
    assert "H200" in elsewhere.rate


def test_engines_share_the_clock_and_not_the_price(tmp_path):
    recipe = with_responses(tmp_path, "eval.price_per_gpu_hour=2")
    one, four = (harvest_plan(recipe, Assumed(gpus=n, tokens_per_second=1)) for n in (1, 4))
    assert four.hours == pytest.approx(one.hours / 4)
    assert four.price == pytest.approx(one.price)


@pytest.mark.parametrize("options", [{"tokens_per_second": -1.0}, {"prompts": 0}, {"answer_tokens": -5}, {"gpus": 0}])
def test_what_is_assumed_is_positive(options):
    with pytest.raises(ValueError, match=r"--[a-z-]+ \S+ must be positive"):
        Assumed(**options)


@pytest.mark.parametrize(
    ("flag", "code", "said"), [("--dry-run", 0, "3 sequences, 22 tokens"), ("--verify", 1, "train")]
)
def test_the_script_runs_neither_model_nor_harvest(tmp_path, capsys, flag, code, said):
    recipe = with_responses(tmp_path)
    assert run_here("data_gen/harvest.py", flag, f"output_dir={tmp_path}") == code
    assert said in capsys.readouterr().out
    assert not recipe.states_dir("train").exists()


def test_a_gpu_without_a_data_sheet_is_refused(tmp_path):
    recipe = with_responses(tmp_path)
    with pytest.raises(ValueError, match="--gpu abacus is not known: a100, b200"):
        harvest_plan(never_measured(recipe), Assumed(gpu="abacus"))
