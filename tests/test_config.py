"""Recipes: all that ship load, and every mistake is named before work starts."""

import pytest
from pydantic import ValidationError

from drafthead.config import REPO_ROOT, PromptsConfig, load_recipe
from drafthead.config.responses import ResponsesConfig

CONFIGS = sorted((REPO_ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_recipe_loads(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lerning_rate=1", "train.lerning_rate: unknown key"),
        ("train.epochs=many", "train.epochs: .*given: 'many'"),
        ("train.epochs=0", "train.epochs: .*greater than 0 .given: 0"),
        ("target.aux_layer_ids=[4,2]", "ascending"),
        ("target.aux_layer_ids=[2,2]", "ascending"),
        ("eval.num_draft_tokens=9", "eval.num_draft_tokens 9 exceeds head.num_ttt_steps 4"),
        ("eval.num_draft_tokens=[3,3]", "eval.num_draft_tokens has 3 twice"),
        ("eval.methods=[ngram,ngram]", "eval.methods has ngram twice"),
        ("eval.methods=[medusa]", "method medusa needs `head`.*FasterDecoding/Medusa"),
        ("eval.methods=[eagle]", "method eagle needs `head`.*SafeAILab/EAGLE"),
        ("eval.methods=[{name: none-x, method: ngram}]", "name"),
        ("eval.methods=[{name: x, method: ngram, head: y}]", "drafts without a model; leave `head` out"),
        ("eval.methods=[{name: x, method: ngram, extra: {model: y}}]", "`extra` has model"),
        ("eval.endpoints=[{name: none, url: 'http://a:1', model: m}]", "`none` is the baseline"),
        ("eval.loads=[{request_rate: 2.5, ramp: linear}]", "whole requests per second, not from 1 to 2.5"),
        ("eval.loads=[{burstiness: 2}]", "needs concurrency, request_rate or both"),
        ("eval.loads=[{concurrency: 2, burstiness: 2}]", "shape a request_rate"),
        ("states.spool_shards=1", r"states.spool_shards: .* greater than or equal to 2 \(given: '?1'?\)"),
        ("eval.traffic.concurrency.4=0", "4: 0.0 must both be positive"),
        ("responses.max_tokens=1024", "max_tokens 1024 leaves no room"),
        ("head.num_key_value_heads=3", "not a multiple of head.num_key_value_heads 3"),
        ("head.head_dim=20", "head.head_dim: .*multiple of 8 .given: 20"),
        ("train.seed=-1", "train.seed: .*greater than or equal to 0"),
        ("name=../elsewhere", "name"),
        ("train", "not of the form section.key=value"),
    ],
)
def test_a_mistake_is_named_with_its_value(override, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(overrides=[override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("responses.server_url=http://a:1", "not on a server .responses.server_url http://a:1"),
        ("responses.regenerate=false", "responses.regenerate false"),
        ("states.backend=transformers", "states.backend transformers and"),
        ("states.spool_shards=4", "states.spool_shards 4 do not go with it"),
    ],
)
def test_one_pass_wants_an_engine_of_our_own_and_a_whole_store(override, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(overrides=["states.one_pass=true", override])


def test_an_override_replaces_what_is_there():
    efforts = load_recipe(overrides=["responses.reasoning_efforts={low: 1, high: 2}"]).responses
    assert efforts.efforts == {"low": 1, "high": 2}  # instead of a list
    twice = load_recipe(overrides=["responses.temperature={0.2: 1}", "responses.temperature={0.9: 1}"]).responses
    assert twice.temperatures == {0.9: 1}  # not both


def test_bf16_without_zero_is_refused():
    with pytest.raises(ValueError, match="set train.zero_stage to 1"):
        load_recipe(overrides=["train.precision=bf16", "train.zero_stage=0"])


def test_a_missing_recipe_lists_those_that_exist():
    with pytest.raises(FileNotFoundError, match=r"nope.yaml does not exist.*configs/tiny.yaml"):
        load_recipe("nope.yaml")


def test_a_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("name: a\nname: b\n")
    with pytest.raises(ValueError, match="duplicate key"):
        load_recipe(path)


def test_yaml_cannot_construct_objects(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text("name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="not valid"):
        load_recipe(path)


def test_a_missing_target_is_named():
    with pytest.raises(FileNotFoundError, match="target.path no/such/target does not exist"):
        load_recipe(overrides=["target.path=no/such/target"]).target_path  # noqa: B018


def test_single_values_and_lists_mean_the_same():
    one, many = (load_recipe(overrides=[f"eval.{key}"]).eval for key in ("num_draft_tokens=2", "num_draft_tokens=[2]"))
    assert one == many
    assert load_recipe(overrides=["eval.reasoning_effort=low"]).eval.reasoning_efforts == ("low",)
    arms = load_recipe(overrides=["eval.methods=[ngram,{name: deep, method: ngram, num_draft_tokens: [4,1]}]"]).eval
    assert [(arm.name, arms.draft_tokens_of(arm)) for arm in arms.methods] == [("ngram", (3,)), ("deep", (4, 1))]
    assert arms.num_draft_tokens == 3


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({}, "exactly one of path, preset and sources, found none"),
        ({"path": "x", "preset": "standard"}, "found path and preset"),
        ({"sources": []}, "found none"),
        ({"sources": [{"name": "a", "train": 1}, {"name": "a"}]}, "source a is given twice"),
        ({"sources": [{"name": "a", "train": 1, "weight": 1}]}, "has both train 1 and weight 1"),
        ({"sources": [{"name": "a", "weight": 1}, {"name": "b", "train": 1}]}, "a has a weight and b a number"),
        ({"sources": [{"name": "a", "categories": {"x": 0.5}}]}, "category x has 0.5 where a number"),
        ({"sources": [{"name": "a", "trane": 1}]}, "trane"),
        ({"preset": "other"}, "standard"),
    ],
)
def test_a_mistake_in_the_prompts_of_a_recipe_is_named(prompts, message):
    with pytest.raises(ValueError, match=message):
        PromptsConfig.model_validate(prompts)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": {}}, "temperature is an empty mapping"),
        ({"temperature": {0.7: 0}}, "greater than 0"),
        ({"temperature": -0.1}, "greater than or equal to 0"),
        ({"reasoning_efforts": {"max": 1}}, "'low', 'medium' or 'high'"),
        ({"reasoning_efforts": ()}, "at least 1 item"),
        ({"server_url": "localhost:8000"}, "write it as http://host:8000/v1"),
    ],
)
def test_settings_of_responses_that_mean_nothing_are_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        ResponsesConfig(max_tokens=8, **wrong)


@pytest.mark.parametrize("overrides", [("head.coverage=0.98",), ("head.draft_vocab_size=0",)])
def test_exactly_one_way_to_choose_a_size(overrides):
    with pytest.raises(ValueError, match=r"head\.draft_vocab_size \d+ and head\.coverage .*: set exactly one"):
        load_recipe(overrides=overrides)


@pytest.mark.parametrize("share", ["0", "1.01", "-1"])
def test_a_coverage_is_a_share(share):
    with pytest.raises(ValueError, match=r"head\.coverage"):
        load_recipe(overrides=["head.draft_vocab_size=0", f"head.coverage={share}"])


def test_only_a_size_chosen_by_coverage_follows_the_vocabulary():
    by_coverage = load_recipe(overrides=["head.draft_vocab_size=0", "head.coverage=0.9"]).head
    assert by_coverage.sized(320).draft_vocab_size == 320
    assert load_recipe().head.sized(320).draft_vocab_size == 2048  # a mismatch is for the export to refuse
