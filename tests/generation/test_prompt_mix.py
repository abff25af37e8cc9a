"""Mixes: amounts, sides, duplicates and overlaps, from files to the prompts artifact."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafthead.artifacts import ArtifactError
from drafthead.config import PromptsConfig, Recipe, load_recipe
from drafthead.data.prompts import SPLITS, Prompt, read_prompts
from drafthead.generation import prompt_mix
from drafthead.generation.prompt_mix import Mix, locate_sources, make_mix, planned_prompts
from drafthead.generation.prompt_report import describe, print_prompts, report_prompts
from drafthead.generation.prompts import make_prompts
from tests.generation.published_rows import PUBLISHED, write_rows
from tests.recipes import changed

LONG = "this question has well over thirteen words in it so that copies of it are an overlap number"


def questions(folder: Path, name: str, count: int, categories: tuple[str, ...] = ("all",)) -> str:
    """A file of different questions; path for a recipe."""
    rows = [{"prompt": f"{name} question {i}", "category": categories[i % len(categories)]} for i in range(count)]
    return str(write_rows(folder / f"{name}.jsonl", rows))


def mixed(*sources: dict[str, Any], **settings: Any) -> Mix:
    config = PromptsConfig.model_validate({"sources": sources, "validation": 1, **settings})
    return make_mix(config, locate_sources(config))


def by(prompts: list[Prompt], key: str) -> Counter[str]:
    return Counter(getattr(p, key) for p in prompts)


def test_counts_are_kept_per_source_and_category(tmp_path):
    a = {"name": "a", "path": questions(tmp_path, "a", 200, ("x", "y", "z")), "categories": {"x": 20, "y": 10}}
    b = {"name": "b", "path": questions(tmp_path, "b", 300), "train": 40, "heldout": 5}
    mix = mixed(a, b)
    assert by(mix.train, "source") == {"a": 30, "b": 40}
    assert by([p for p in mix.train if p.source == "a"], "category") == {"x": 20, "y": 10}
    assert by(mix.heldout, "source") == {"b": 5}
    assert not mix.report["notes"]


def test_weights_hold_per_source_and_category(tmp_path):
    a = {"name": "a", "path": questions(tmp_path, "a", 300, ("x", "y")), "weight": 3, "categories": {"x": 4, "y": 1}}
    b = {"name": "b", "path": questions(tmp_path, "b", 300), "weight": 1, "heldout": 5}
    mix = mixed(a, b, max_train=99)
    assert by(mix.train, "source") == {"a": 75, "b": 25}
    assert by([p for p in mix.train if p.source == "a"], "category") == {"x": 60, "y": 15}
    everything = mixed(a, b)  # without a total: as many as the weights allow
    assert by(everything.train, "source")["b"] * 3 >= by(everything.train, "source")["a"] > 75
    short = mixed({**a, "categories": None}, b, max_train=2000)
    assert by(short.train, "source")["b"] * 3 == by(short.train, "source")["a"]
    assert len(short.report["notes"]) == 1


@pytest.mark.parametrize(
    ("amounts", "note"),
    [
        ({"train": 500}, "500"),
        ({"train": 5, "heldout": 90, "heldout_share": 0.3}, "90"),
        ({"categories": {"x": 60}}, "x instead of 60"),
    ],
)
def test_a_shortage_is_noted(tmp_path, amounts, note):
    path = questions(tmp_path, "a", 30, ("x", "y"))
    assert note in mixed({"name": "a", "path": path, **amounts}).report["notes"][0]


def test_draws_follow_from_the_seed_and_nothing_else(tmp_path):
    a = {"name": "a", "path": questions(tmp_path, "a", 200), "train": 50, "heldout": 5}
    b = {"name": "b", "path": questions(tmp_path, "b", 200), "train": 5}
    alone, beside, other = mixed(a), mixed(b, a), mixed(a, seed=1)
    assert alone.train == mixed(a).train == [p for p in beside.train if p.source == "a"]
    assert alone.train != other.train
    fewer = mixed({**a, "train": 20})
    assert fewer.train == alone.train[:20]


def test_a_document_stays_on_one_side_whatever_is_asked(tmp_path):
    chats = [
        {
            "id": f"chat{i}",
            "conversations": [{"from": r, "value": f"{i} {r} {t}"} for t in range(3) for r in ("human", "gpt")],
        }
        for i in range(60)
    ]
    a = {"name": "sharegpt", "path": str(write_rows(tmp_path / "s.json", chats)), "turns": "all", "heldout_share": 0.3}
    sides: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for heldout in (1, 20, 1000):
        mix = mixed({**a, "train": 1000, "heldout": heldout})
        assert len(mix.train) == 3 * len(by(mix.train, "document"))
        sides["train"] |= {p.document for p in mix.train}
        sides["heldout"] |= {p.document for p in mix.heldout}
    assert all(sides.values())
    assert not sides["train"] & sides["heldout"]
    assert len(sides["train"] | sides["heldout"]) == 60


def test_duplicates_count_once_and_held_out_wins(tmp_path):
    held = str(write_rows(tmp_path / "held.jsonl", [{"prompt": "Same  Question"}, {"prompt": "other"}]))
    train = str(write_rows(tmp_path / "t.jsonl", [{"prompt": t} for t in ("same question", "mine", "MINE", "yours")]))
    mix = mixed(
        {"name": "t", "path": train, "train": 10, "heldout_share": 1e-9},
        {"name": "h", "path": held, "heldout": 2, "heldout_share": 1},
    )
    assert len(mix.train) == 2
    assert len(mix.heldout) == 2
    assert mix.report["duplicates_dropped"] == 2


def test_no_training_prompt_shares_words_with_an_evaluation_set(tmp_path):
    bench = [{"question_id": i, "category": "c", "turns": [f"{LONG} {i} x{i} y{i}"]} for i in range(20)]
    wrapped = f"Please help me. {bench[7]['turns'][0].upper()}!"
    train = [{"prompt": wrapped}, *({"prompt": f"harmless {i}"} for i in range(30))]
    sources = (
        {"name": "t", "path": str(write_rows(tmp_path / "t.jsonl", train)), "train": 100, "heldout_share": 1e-9},
        {"name": "mt-bench", "path": str(write_rows(tmp_path / "b.jsonl", bench[:10]))},  # a guard: none is drawn
        {"name": "t2", "path": questions(tmp_path, "t2", 50), "heldout": 2, "heldout_share": 0.3},
    )
    mix = mixed(*sources)
    assert wrapped not in {p.messages[-1]["content"] for p in mix.train}
    assert by(mix.train, "source")["t"] == 30
    (pair,) = mix.report["overlaps"]
    assert (pair["train"], pair["heldout"], pair["prompts"]) == ("t", "mt-bench", 1)
    assert pair["example"]["words"].startswith("this question has well over thirteen")
    assert any("mt-bench" in line for line in describe(load_recipe(), mix.report))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"name": "mt-bench", "train": 1}, "mt-bench is held out"),
        ({"name": "burstgpt", "train": 1}, "burstgpt is a trace"),
        ({"name": "sharegpt", "heldout": 1, "heldout_share": 1e-9}, "no document of sharegpt"),
        ({"name": "sharegpt", "train": 1, "heldout_share": 0.9999999}, "sharegpt has no training prompt"),
    ],
)
def test_what_a_source_cannot_give_is_an_error(source, message, tmp_path):
    published = PUBLISHED[source["name"]]
    path = write_rows(tmp_path / f"rows{published.extension}", published.rows)
    with pytest.raises(ValueError, match=message):
        mixed({**source, "path": str(path)})


@pytest.fixture
def standard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe_in: Callable[..., Recipe]) -> Recipe:
    """The preset over small files in the published schemas."""
    chats = [{"id": f"c{i}_0", "conversations": [{"from": "human", "value": f"chat {i}"}]} for i in range(80)]
    long = [{"input_tokens": [1, 2, 3 + i], "dataset": "pubmed"} for i in range(80)]
    issue = PUBLISHED["swe-bench"].rows[0]
    issues = [{**issue, "repo": f"r{i % 8}", "problem_statement": f"issue {i}"} for i in range(80)]
    write_rows(tmp_path / "s" / "ShareGPT_V3_unfiltered_cleaned_split.json", chats)
    write_rows(tmp_path / "m" / "perf" / "perf_eval_ref.parquet", long)
    write_rows(tmp_path / "w" / "data" / "train-0.parquet", issues[:40])
    write_rows(tmp_path / "w" / "data" / "test-0.parquet", [{**row, "repo": "held"} for row in issues[40:]])
    paths = {"sharegpt": "s", "mlperf-gpt-oss": "m", "swe-bench": "w"}
    preset = tuple(
        s.model_copy(update={"path": str(tmp_path / paths[s.name]), "train": 30, "heldout": 2})
        for s in prompt_mix.PRESETS["standard"]
    )
    monkeypatch.setitem(prompt_mix.PRESETS, "standard", preset)
    return recipe_in("prompts.path=null", "prompts.preset=standard", "prompts.max_train=60", "prompts.max_heldout=6")


def test_the_preset_has_its_three_workloads_in_every_split(standard: Recipe, capsys: pytest.CaptureFixture[str]):
    manifest = make_prompts(standard)
    splits = {split: read_prompts(standard.prompts_dir, split) for split in SPLITS}
    assert by(splits["heldout"], "category") == {"sharegpt": 2, "mlperf": 2, "swe-bench": 2}
    assert set(by(splits["train"], "category")) == {"sharegpt", "mlperf", "swe-bench"}
    documents = {split: {p.document for p in prompts} for split, prompts in splits.items()}
    assert not documents["train"] & documents["heldout"]
    assert not documents["train"] & documents["validation"]
    assert not documents["validation"] & documents["heldout"]
    assert make_prompts(standard) == manifest
    print_prompts(standard, manifest)
    assert "REMINDER: mlperf-gpt-oss" in capsys.readouterr().out


def test_a_changed_source_is_another_artifact(standard: Recipe, tmp_path: Path):
    make_prompts(standard)
    path = tmp_path / "s" / "ShareGPT_V3_unfiltered_cleaned_split.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:-1]))
    with pytest.raises(ArtifactError, match=r"was made from something else:\n  sources"):
        make_prompts(standard)


def test_a_mix_that_fails_leaves_nothing_behind(tmp_path: Path, recipe_in: Callable[..., Recipe]):
    recipe = recipe_in()
    bad = PromptsConfig.model_validate({"sources": [{"name": "a", "path": questions(tmp_path, "a", 30), "train": 9}]})
    with pytest.raises(ValueError, match="no heldout prompt"):
        make_prompts(recipe.model_copy(update={"prompts": bad}))
    assert not recipe.prompts_dir.exists()


def test_the_report_has_lengths_categories_and_vocabulary(standard: Recipe):
    manifest = make_prompts(standard)
    report_prompts(standard, manifest)
    folder = standard.results_dir / "prompts"
    text = (folder / "report.md").read_text()
    assert "| mlperf-gpt-oss | mlperf | " in text
    assert "| train | all | " in text
    assert "of 3,072 tokens of the vocabulary occur in heldout" in text
    assert (folder / "prompts.png").read_bytes().startswith(b"\x89PNG")
    written = (folder / "report.md").stat().st_mtime_ns
    report_prompts(standard, manifest)
    assert (folder / "report.md").stat().st_mtime_ns == written  # of these prompts already


def test_the_report_does_without_the_targets_tokenizer(standard: Recipe):
    manifest = make_prompts(standard)
    report_prompts(changed(standard, "target", path="no/such/target"), manifest)
    assert "no/such/target" in (standard.results_dir / "prompts" / "report.md").read_text()


def test_names_with_markup_are_printed_as_they_are(tmp_path, recipe_in, capsys):
    sources = [{"name": "a", "path": questions(tmp_path, "a", 60, ("[/x]", "$|$")), "train": 40, "heldout": 1}]
    recipe = recipe_in(f"output_dir={tmp_path / '[red]'}")
    config = PromptsConfig.model_validate({"sources": sources, "validation": 1})
    recipe = recipe.model_copy(update={"prompts": config})
    manifest = make_prompts(recipe)
    print_prompts(recipe, manifest)
    printed = capsys.readouterr().out
    assert "[/x]" in printed
    assert "[red]" in "".join(printed.split())
    report_prompts(recipe, manifest)
    assert r"$\|$" in (recipe.results_dir / "prompts" / "report.md").read_text()


COUNTED = {"name": "a", "path": "a.jsonl", "train": 50, "heldout": 5}
CATEGORIES = {"name": "b", "path": "b.jsonl", "categories": {"x": 20, "y": 10}}
WEIGHTED = {"name": "c", "path": "c.jsonl", "weight": 1, "heldout": 5}


@pytest.mark.parametrize(
    ("prompts", "planned"),
    [
        ({"preset": "standard"}, (82_452, 48, 2_400)),
        ({"preset": "standard", "max_train": 1000, "max_heldout": 30}, (1000, 48, 30)),
        ({"sources": [COUNTED, CATEGORIES], "validation": 8}, (72, 8, 5)),
        ({"sources": [WEIGHTED], "max_train": 100, "validation": 8}, (100, 8, 5)),
        ({"sources": [WEIGHTED]}, None),
        ({"path": "p.jsonl"}, None),
        ({"path": "p.jsonl", "max_train": 9, "max_heldout": 2}, (9, 48, 2)),
    ],
)
def test_the_planned_prompts_are_those_of_the_recipe(prompts, planned):
    found = planned_prompts(PromptsConfig.model_validate(prompts))
    assert found == (planned and dict(zip(SPLITS, planned, strict=True)))


def test_a_weight_is_finite():
    for source in ({"name": "a", "weight": float("inf")}, {"name": "a", "train": 1, "categories": {"x": float("inf")}}):
        with pytest.raises(ValueError, match="finite"):
            PromptsConfig.model_validate({"sources": [source]})
