"""Recipes: all that ship load, and every mistake is named before work starts."""

import pytest

from drafthead.config import REPO_ROOT, load_recipe
from drafthead.generation.prompts import locate_sources


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("train.lerning_rate=1", r"train\.lerning_rate"),
        ("train.epochs=many", r"train\.epochs.*'many'"),
        ("target.aux_layer_ids=[4,2]", r"target.aux_layer_ids \[4, 2\]"),
        ("target.aux_layer_ids=[2,2]", r"target.aux_layer_ids \[2, 2\]"),
        ("eval.num_draft_tokens=9", "eval.num_draft_tokens 9 .* 4 draft positions"),
        ("eval.num_draft_tokens=[3,3]", "eval.num_draft_tokens: 3 "),
        ("eval.methods=[ngram,ngram]", "eval.methods: ngram"),
        ("eval.served=[typo]", "eval.served .*typo.*head, ngram"),
        ("eval.methods=[]", "eval.methods: .*at least 1"),
        ("eval.concurrency=[]", "eval.concurrency: .*at least 1"),
        ("eval.methods=[medusa]", "medusa .*FasterDecoding/Medusa"),
        ("eval.methods=[{name: none-x, method: ngram}]", "name"),
        ("eval.methods=[{name: x, method: ngram, head: y}]", "x.*ngram.*`head`"),
        ("eval.methods=[{name: x, method: ngram, extra: {model: y}}]", "`extra` .*model"),
        ("eval.endpoints=[{name: none, url: 'http://a:1', model: m}]", "none names a method"),
        ("eval.endpoints=[{name: suffix, url: 'http://a:1', model: m}]", "suffix names a method"),
        ("eval.concurrency=[{burstiness: 2}]", "concurrency.*request_rate"),
        ("eval.concurrency=[{concurrency: 2, burstiness: 2}]", "request_rate"),
        ("states.spool_shards=1", r"states.spool_shards.*'?1'?"),
        ("eval.traffic.concurrency.4=0", "eval.traffic.concurrency.4: .*0"),
        (
            ("head.num_attention_heads=6", "head.num_key_value_heads=3", "engine.tensor_parallel_size=2"),
            "num_key_value_heads 3 .*tensor_parallel_size 2 .*choose",
        ),
        (("eval.concurrency=0",), r"eval\.concurrency\.0\.concurrency: .*greater than 0 \(given: 0\)$"),
        ("eval.endpoints=[{name: a, url: 'http://host:abc', model: m}]", "'http://host:abc' must be http://host:port"),
        ("responses.max_tokens=1024", "max_tokens 1024 .*engine.max_model_len"),
        ("head.num_key_value_heads=3", "head.num_key_value_heads 3"),
        ("head.head_dim=20", r"head.head_dim.*20"),
        (
            ("head.num_ttt_steps=4", "head.sliding_window=5"),
            r"head\.sliding_window 5 leaves 4 draft positions.*at least 6",
        ),
        ("train.lr=1", r"train\.lr: unknown key"),
        ("train.learning_rte=1", r"train\.learning_rte: .*train\.learning_rate"),
        ("head.ttt_steps=1", r"head\.ttt_steps: .*head\.num_ttt_steps"),
        ("prompts.sources=[{nme: a}]", r"prompts\.sources\.0\.nme: .*prompts\.sources\.name"),
        ("name=../elsewhere", "name.*/elsewhere"),
        (("head.type=dflash", "head=null"), "head"),
        ("train", "'train'"),
        (("train.precision=bf16", "train.zero_stage=0"), r"train.precision.*train.zero_stage"),
        ("head.coverage=0.98", r"head\.draft_vocab_size 2048 and head\.coverage 0.98"),
        ("head.draft_vocab_size=0", r"head\.draft_vocab_size 0 and head\.coverage None"),
        (("head.draft_vocab_size=0", "head.coverage=1.01"), "head.coverage"),
        (("prompts.path=null", "prompts.sources=[{name: a, path: b, turns: all}]"), "a makes .*turns: all"),
        ("prompts.path=null", "path or sources.* none"),
        ("prompts.sources=[{name: a}]", "path or sources.* both"),
        (("prompts.path=null", "prompts.sources=[{name: a, train: 1}, {name: a}]"), "source a "),
        ("responses.temperature={}", "responses.temperature"),
        ("responses.temperature={0.7: 0}", "responses.temperature"),
        ("responses.temperature=-0.1", "responses.temperature"),
        ("responses.reasoning_efforts={max: 1}", "'low', 'medium' or 'high'"),
        ("responses.reasoning_efforts=[]", "responses.reasoning_efforts"),
    ],
)
def test_a_mistake_is_named_with_its_value(overrides, named):
    with pytest.raises(ValueError, match=named):
        load_recipe(overrides=[overrides] if isinstance(overrides, str) else overrides)


def test_a_head_without_its_type_or_of_another_is_refused_with_that_key(tmp_path):
    recipe = tmp_path / "untyped.yaml"
    recipe.write_text((REPO_ROOT / "configs/tiny.yaml").read_text().replace("  type: eagle3\n", ""))
    with pytest.raises(ValueError, match=r"head\.type: .*eagle3"):
        load_recipe(recipe)
    with pytest.raises(ValueError, match=r"head\.type: .*'eagle9'"):
        load_recipe(recipe, ["head.type=eagle9"])


def test_another_drafter_is_chosen_by_its_type_alone():
    head = load_recipe(overrides=["head.type=dflash", "head.mask_token_id=9"]).head
    assert (head.type, head.intermediate_size, head.num_positions) == ("dflash", 512, 7)
    with pytest.raises(ValueError, match=r"head\.mask_token_id"):
        load_recipe(overrides=["head.type=dflash"])
    with pytest.raises(ValueError, match=r"head\.num_ttt_steps"):
        load_recipe(overrides=["head.type=dflash", "head.mask_token_id=9", "head.num_ttt_steps=3"])


def test_an_override_replaces_what_is_there():
    efforts = load_recipe(overrides=["responses.reasoning_efforts={low: 1, high: 2}"]).responses
    assert efforts.efforts == {"low": 1, "high": 2}  # instead of a list
    twice = load_recipe(overrides=["responses.temperature={0.2: 1}", "responses.temperature={0.9: 1}"]).responses
    assert twice.temperatures == {0.9: 1}  # not both


def test_a_missing_recipe_lists_those_that_exist():
    with pytest.raises(FileNotFoundError, match=r"nope.yaml .*configs/tiny.yaml"):
        load_recipe("nope.yaml")


@pytest.mark.parametrize(
    ("content", "named"),
    [("name: a\nname: b\n", "duplicate key"), ("name: !!python/object/apply:os.getcwd []\n", "not valid")],
    ids=["a key given twice", "an object of Python"],
)
def test_yaml_is_plain_data(content, named, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=named):
        load_recipe(path)


def test_a_missing_target_is_named():
    with pytest.raises(FileNotFoundError, match="target.path no/such/target"):
        load_recipe(overrides=["target.path=no/such/target"]).target_path  # noqa: B018


def test_single_values_and_lists_mean_the_same():
    one, many = (load_recipe(overrides=[f"eval.{key}"]).eval for key in ("num_draft_tokens=2", "num_draft_tokens=[2]"))
    assert one == many
    assert load_recipe(overrides=["eval.reasoning_effort=low"]).eval.reasoning_efforts == ("low",)
    section = load_recipe(overrides=["eval.methods=[ngram,{name: deep, method: ngram, num_draft_tokens: [4,1]}]"]).eval
    assert [(method.name, section.draft_tokens_of(method)) for method in section.methods] == [
        ("ngram", (3,)),
        ("deep", (4, 1)),
    ]
    assert section.num_draft_tokens == 3


def test_only_a_size_chosen_by_coverage_follows_the_vocabulary():
    by_coverage = load_recipe(overrides=["head.draft_vocab_size=0", "head.coverage=0.9"]).head
    assert by_coverage.sized(320).draft_vocab_size == 320
    assert load_recipe().head.sized(320).draft_vocab_size == 2048  # a mismatch is for the export to refuse


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "one").mkdir(parents=True)
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    recipe = load_recipe(overrides=["output_dir=~/x", "target.path=~/models/one", "prompts.path=~/p.jsonl"])
    assert recipe.results_dir == tmp_path / "x" / "results" / "tiny"
    assert recipe.target_path == str(tmp_path / "models" / "one")
    assert locate_sources(recipe.prompts)[0].files == [tmp_path / "p.jsonl"]
    with pytest.raises(ValueError, match="~no-such-user/x"):
        load_recipe(overrides=["output_dir=~no-such-user/x"]).directory()
