"""From files to splits: amounts, sides, duplicates, overlaps and draws, and the report of the artifact."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from drafthead.artifacts import ArtifactError, read_manifest
from drafthead.config import Recipe, load_recipe
from drafthead.config.recipe import PromptsConfig
from drafthead.data.prompts import SPLITS, Prompt, read_prompts
from drafthead.generation.prompts import (
    Mix,
    draw_evenly,
    locate_sources,
    make_mix,
    make_prompts,
    print_prompts,
    split_prompts,
)
from tests.generation.published_rows import PUBLISHED, write_rows
from tests.generation.small import small_recipe
from tests.scripts import run_here

LONG = "this question has well over thirteen words in it so that copies of it are an overlap number"


def questions(folder: Path, name: str, count: int, categories: tuple[str, ...] = ("all",)) -> str:
    """A file of different questions; path for a recipe."""
    rows = [{"prompt": f"{name} question {i}", "category": categories[i % len(categories)]} for i in range(count)]
    return str(write_rows(folder / f"{name}.jsonl", rows))


def mixed(*sources: dict[str, Any], **settings: Any) -> Mix:
    config = PromptsConfig.model_validate({"sources": sources, "validation": 1, **settings})
    return make_mix(config, locate_sources(config))


def splits_of(recipe: Recipe) -> dict[str, list[Prompt]]:
    return {split: read_prompts(recipe.prompts_dir, split) for split in SPLITS}


def whole(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Recipe:
    """The recipe of a file, all of which is drawn."""
    path, limits = write_rows(folder / "p.jsonl", rows), ("prompts.max_train=null", "prompts.max_heldout=null")
    return small_recipe(folder, f"prompts.path={path}", *limits, "prompts.validation=1", *overrides)


def by(prompts: list[Prompt], key: str) -> Counter[str]:
    return Counter(getattr(p, key) for p in prompts)


def test_duplicates_are_dropped_and_counted_and_held_out_wins(tmp_path: Path):
    texts = [("one", "train"), ("two", "train"), ("One\n", "train"), ("three", "heldout"), ("Three", "train")]
    recipe = whole(tmp_path, [{"prompt": text, "split": split} for text, split in texts])
    assert make_prompts(recipe)["counts"]["duplicates_dropped"] == 2
    splits = splits_of(recipe)
    texts_by_split = {split: {p.messages[0]["content"].strip().lower() for p in splits[split]} for split in SPLITS}
    assert texts_by_split["train"] | texts_by_split["validation"] == {"one", "two"}
    assert texts_by_split["heldout"] == {"three"}


@pytest.mark.parametrize(("history", "trained"), [("regenerated", 2), ("given", 3)])
def test_no_first_turn_of_a_training_chat_is_held_out(history, trained, tmp_path: Path):
    chat = [{"role": role, "content": text} for role, text in (("user", "Held?"), ("assistant", "a"), ("user", "b"))]
    rows = [{"prompt": "one"}, {"prompt": "two"}, {"messages": chat}, {"prompt": "held?", "split": "heldout"}]
    rows = [{"split": "train", **row} for row in rows]
    counts = make_prompts(whole(tmp_path, rows, f"responses.history={history}"))["counts"]
    assert counts["train"] + counts["validation"] == trained
    assert counts["duplicates_dropped"] == 3 - trained


def test_draws_are_as_even_as_the_categories_allow():
    numbers = {"a": 10, "b": 2, "c": 10}
    prompts = [Prompt(f"{c}{i}", "local", c, ({"role": "user"},)) for c, n in numbers.items() for i in range(n)]
    drawn = draw_evenly(prompts, 12, seed=0)
    assert by(drawn, "category") == {"a": 5, "b": 2, "c": 5}
    assert drawn == draw_evenly(prompts[::-1], 12, seed=0)
    assert drawn != draw_evenly(prompts, 12, seed=1)
    assert len(draw_evenly(prompts, None, seed=0)) == 22


def test_splits_are_disjoint_even_and_repeatable(tmp_path: Path):
    recipe, fewer = small_recipe(tmp_path), small_recipe(tmp_path / "fewer", "prompts.max_train=8")
    manifest = make_prompts(recipe)
    splits = splits_of(recipe)
    assert {split: len(prompts) for split, prompts in splits.items()} == {"train": 12, "validation": 4, "heldout": 4}
    assert len({p.id for prompts in splits.values() for p in prompts}) == 20
    assert set(by(splits["train"], "category").values()) == {3}
    assert make_prompts(recipe) == manifest  # complete: nothing is written again
    with pytest.raises(ArtifactError, match=r"settings\.seed: found 0, wanted 1"):
        make_prompts(small_recipe(tmp_path, "prompts.seed=1"))
    make_prompts(fewer)
    assert splits_of(fewer)["validation"] == splits["validation"]  # another max_train keeps it


def test_validation_costs_training_few_documents_and_says_so(tmp_path: Path):
    """As SWE-bench's rows, whose documents are some dozen repositories."""
    rows = [{"prompt": f"issue {i} of {repo}", "repo": f"r{repo}"} for repo in range(20) for i in range(15)]
    issues, rows_of_b = write_rows(tmp_path / "a.jsonl", rows), questions(tmp_path, "b", 20)
    sources = (
        f"[{{name: a, path: {issues}, train: 300, heldout_share: 1.0e-9}}, "
        f"{{name: b, path: {rows_of_b}, heldout: 5, heldout_share: 0.9}}]"
    )
    limits = ("prompts.max_train=null", "prompts.max_heldout=null", "prompts.validation=20")
    recipe = small_recipe(tmp_path, "prompts.path=null", f"prompts.sources={sources}", *limits)
    counts, splits = make_prompts(recipe)["counts"], splits_of(recipe)
    documents = {split: {p.document for p in splits[split]} for split in ("train", "validation")}
    assert (len(documents["train"]), len(documents["validation"])) == (18, 2)
    assert (len(splits["train"]), len(splits["validation"])) == (270, 20)
    assert "a: 10 training prompts are of documents that validation has" in counts["notes"]


def test_validation_leaves_half_of_a_rare_category_to_training(tmp_path: Path):
    kinds = ["rare"] * 10 + ["chat", "code"] * 145
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": f"{k} {i}", "category": k} for i, k in enumerate(kinds)])
    recipe = small_recipe(tmp_path, f"prompts.path={path}", "prompts.max_train=null", "prompts.validation=48")
    make_prompts(recipe)
    counts = {split: by(prompts, "category") for split, prompts in splits_of(recipe).items()}
    rare = 10 - counts["heldout"].get("rare", 0)
    assert counts["validation"]["rare"] == rare // 2
    assert counts["train"]["rare"] == rare - rare // 2
    assert sum(counts["validation"].values()) == 48


def test_too_much_validation_and_a_folder_of_several_files_are_refused(tmp_path: Path):
    path = write_rows(tmp_path / "folder" / "a.jsonl", [{"prompt": s, "split": s} for s in ("train", "heldout")])
    with pytest.raises(ValueError, match=r"prompts\.validation 4 leaves 0 of 1"):
        make_prompts(small_recipe(tmp_path, f"prompts.path={path}"))
    write_rows(path.with_name("b.jsonl"), [{"prompt": "b"}])
    with pytest.raises(ValueError, match=r"prompts\.path .*folder has 2 files.*prompts\.sources"):
        make_prompts(small_recipe(tmp_path, f"prompts.path={path.parent}"))


def test_numbers_are_met_per_source_and_category(tmp_path):
    a = {"name": "a", "path": questions(tmp_path, "a", 200, ("x", "y", "z")), "train": {"x": 20, "y": 10}}
    b = {"name": "b", "path": questions(tmp_path, "b", 300), "train": 40, "heldout": 5}
    mix = mixed(a, b)
    assert by(mix.train, "source") == {"a": 30, "b": 40}
    assert by([p for p in mix.train if p.source == "a"], "category") == {"x": 20, "y": 10}
    assert by(mix.heldout, "source") == {"b": 5}
    assert not mix.report["notes"]


@pytest.mark.parametrize(
    ("amounts", "note"),
    [
        ({"train": 500}, "500"),
        ({"train": 5, "heldout": 90, "heldout_share": 0.3}, "90"),
        ({"train": {"x": 60}}, "x instead of 60"),
    ],
)
def test_a_shortage_is_noted(tmp_path, amounts, note):
    path = questions(tmp_path, "a", 30, ("x", "y"))
    assert note in mixed({"name": "a", "path": path, **amounts}).report["notes"][0]


def test_repeated_prompts_leave_room_for_others(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": f"question {i}"} for i in [*range(300), *[0, 1, 2, 3] * 1000]])
    mix = mixed({"name": "a", "path": str(path), "train": 200, "heldout_share": 1e-9})
    assert len(mix.train) == 200


def test_draws_follow_from_the_seed_and_nothing_else(tmp_path):
    a = {"name": "a", "path": questions(tmp_path, "a", 5000), "train": 50, "heldout": 5}
    b = {"name": "b", "path": questions(tmp_path, "b", 200), "train": 5}
    alone, beside, other = mixed(a), mixed(b, a), mixed(a, seed=1)
    assert alone.train == mixed(a).train == [p for p in beside.train if p.source == "a"]
    assert alone.train != other.train
    assert mixed({**a, "train": 20}).train == alone.train[:20]
    assert mixed({**a, "train": 5000}).train[:50] == alone.train  # whatever was left out to save memory


def test_a_document_stays_on_one_side_whatever_is_drawn(tmp_path):
    turns = [(role, t) for t in "123" for role in ("human", "gpt")]
    chats = [
        {"id": f"chat{i}", "conversations": [{"from": role, "value": f"{i} {role} {t}"} for role, t in turns]}
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


def test_a_chat_that_declares_its_split_is_not_validated_on_as_well(tmp_path):
    turns = [(role, t) for t in "123" for role in ("user", "assistant")]
    rows = [
        {"messages": [{"role": role, "content": f"{i} {t} {role}"} for role, t in turns], "split": split}
        for i, split in enumerate(["train"] * 30 + ["heldout"])
    ]
    a = {"name": "a", "path": str(write_rows(tmp_path / "a.jsonl", rows)), "turns": "all", "train": 90, "heldout": 3}
    mix = mixed(a)
    splits = split_prompts(PromptsConfig.model_validate({"sources": [a], "validation": 12}), mix.train, mix.heldout)
    chats = {split: {p.messages[0]["content"] for p in prompts} for split, prompts in splits.items()}
    assert len(splits["validation"]) == 12
    assert chats["train"]
    assert not chats["train"] & chats["validation"]


def test_no_training_prompt_shares_words_with_an_evaluation_set(tmp_path):
    bench = [{"question_id": i, "category": "c", "turns": [f"{LONG} {i} x{i} y{i}"]} for i in range(10)]
    wrapped = f"Please help me. {bench[7]['turns'][0].upper()}!"
    train = [{"prompt": wrapped}, *({"prompt": f"harmless {i}"} for i in range(30))]
    mix = mixed(
        {"name": "t", "path": str(write_rows(tmp_path / "t.jsonl", train)), "train": 100, "heldout_share": 1e-9},
        {"name": "mt-bench", "path": str(write_rows(tmp_path / "b.jsonl", bench))},  # a guard: none is drawn
    )
    assert wrapped not in {p.messages[-1]["content"] for p in mix.train}
    assert len(mix.train) == 30
    assert "1 training prompts of t share 13 words with held-out mt-bench" in mix.report["notes"][0]
    assert "this question has well over thirteen" in mix.report["notes"][0]


def test_overlaps_within_a_single_file_are_reported_and_kept(tmp_path):
    texts = {"train": [f"{LONG} today", "two", "three"], "heldout": [LONG]}
    rows = [{"prompt": text, "split": split} for split, group in texts.items() for text in group]
    counts = make_prompts(whole(tmp_path, rows))["counts"]
    assert counts["train"] == 2
    assert "kept" in counts["notes"][0]
    assert "`" not in counts["notes"][0], "no text of a file of one's own"


def test_sources_that_share_prompts_give_the_same_in_any_order(tmp_path: Path, capsys):
    """Spec-Bench has all questions of MT-bench."""
    turns = [{"question_id": i, "category": "writing", "turns": [f"Write {LONG} {i}"]} for i in range(12)]
    write_rows(tmp_path / "mt.jsonl", turns[:4])
    write_rows(tmp_path / "spec.jsonl", turns)
    write_rows(tmp_path / "guard.jsonl", turns[:2])  # nothing is drawn of it
    both = write_rows(tmp_path / "both.jsonl", [{"prompt": f"ours question {i}"} for i in range(0, 30, 3)])
    sources = [
        {"name": "spec-bench", "path": str(tmp_path / "spec.jsonl"), "heldout": 12},
        {"name": "mt-bench", "path": str(tmp_path / "mt.jsonl"), "heldout": 4},
        {"name": "speculators-qa", "path": str(tmp_path / "guard.jsonl")},
        {"name": "ours", "path": questions(tmp_path, "ours", 30), "train": 30},
        {"name": "both", "path": str(both), "train": 8},
    ]  # fmt: skip
    contents = set()
    for i, order in enumerate((sources, sources[::-1], sources[2:] + sources[:2])):
        options = [
            f"output_dir={tmp_path / str(i)}", f"prompts.sources={json.dumps(order)}", "prompts.path=null",
            "prompts.validation=2", "prompts.max_heldout=null",
        ]  # fmt: skip
        assert run_here("data_gen/prompts.py", *options) == 0
        recipe = load_recipe(overrides=options)
        splits = splits_of(recipe)
        assert by(splits["heldout"], "source") == {"spec-bench": 8, "mt-bench": 4}
        identity = read_manifest(recipe.prompts_dir)["identity"]
        contents.add((str(splits), json.dumps(identity)))
    assert len(contents) == 1
    assert "spec-bench: 8 held-out prompts instead of 12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"name": "mt-bench", "train": 1}, "mt-bench has no training prompts"),
        ({"name": "sharegpt", "heldout": 1, "heldout_share": 1e-9}, "sharegpt has no held-out prompts"),
        ({"name": "nemotron-v2", "train": {"chemistry": 5}}, "nemotron-v2 has no training prompts chemistry"),
    ],
)
def test_what_a_source_cannot_give_is_an_error(source, message, tmp_path):
    published = PUBLISHED[source["name"]]
    path = write_rows(tmp_path / f"rows{published.extension}", published.rows)
    with pytest.raises(ValueError, match=message):
        mixed({**source, "path": str(path)})


def test_a_mix_has_its_workloads_in_every_split_and_is_made_again_from_other_files(tmp_path, capsys):
    """One source split by its documents, and one with a published test split."""
    rows = [{"input_tokens": [1, 2, 3 + i], "dataset": "pubmed"} for i in range(40)]
    issues = [{"repo": f"r{i % 8}", "problem_statement": f"issue {i}"} for i in range(40)]
    long = write_rows(tmp_path / "m" / "perf" / "perf_eval_ref.parquet", rows)
    write_rows(tmp_path / "w" / "data" / "train-0.parquet", issues[:30])
    write_rows(tmp_path / "w" / "data" / "test-0.parquet", [{**row, "repo": "held"} for row in issues[30:]])
    places = {"mlperf-gpt-oss": "m", "swe-bench": "w"}
    mix = ", ".join(f"{{name: {n}, path: {tmp_path / p}, train: 15, heldout: 2}}" for n, p in places.items())
    recipe = small_recipe(tmp_path, "prompts.path=null", f"prompts.sources=[{mix}]", "prompts.max_train=20")
    manifest = make_prompts(recipe)
    print_prompts(recipe, manifest)
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["total", "20", "4", "4"] in table
    assert any(row[:2] == ["mlperf-gpt-oss", "mlperf"] for row in table)
    assert any("REMINDER:" in row for row in table)
    splits = splits_of(recipe)
    assert by(splits["heldout"], "category") == {"mlperf": 2, "swe-bench": 2}
    assert by(splits["train"], "category") == {"mlperf": 10, "swe-bench": 10}
    documents = [name for prompts in splits.values() for name in by(prompts, "document")]
    assert len(documents) == len(set(documents))
    assert make_prompts(recipe) == manifest
    write_rows(long, rows[:-1])
    with pytest.raises(ArtifactError, match=r"was made from something else:\n  sources"):
        make_prompts(recipe)
