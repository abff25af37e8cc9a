"""From JSONL to splits: what is refused, what is dropped, and that draws are even and repeatable."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafthead.config import Recipe
from drafthead.data.prompts import SPLITS, Prompt, read_prompts
from drafthead.generation.prompts.splits import draw_evenly, make_prompts, read_source
from drafthead.provenance import ArtefactError
from tests.scripts import run_python


def line(text: str, split: str = "train", **more: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}], "split": split, **more})


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(entry if isinstance(entry, bytes) else entry.encode() for entry in lines))
    return path


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"messages": ', r"p\.jsonl:2: not JSON in UTF-8"),
        (b'{"messages": "\xff"}', r"p\.jsonl:2: not JSON in UTF-8"),
        ("[1]", r"p\.jsonl:2: found \[1\], wanted an object"),
        ('{"split": "train", "messages": ["hi"]}', r"p\.jsonl:2: message 'hi' is not an object"),
        ('{"split": "train", "messages": []}', r"p\.jsonl:2: `messages` must be a non-empty list, found \[\]"),
        (line("x", split="test"), r"p\.jsonl:2: split is 'test'; write"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"p\.jsonl:2: split is None"),
        (line(" "), r"p\.jsonl:2: a user message has no text"),
        (line("ONE ", split="heldout"), r"p\.jsonl:2: this heldout prompt is also in split train \(line 1\)"),
    ],
)
def test_a_bad_line_is_named_with_its_value(tmp_path: Path, bad: str | bytes, message: str):
    with pytest.raises(ValueError, match=message):
        read_source(write(tmp_path / "p.jsonl", line("one"), bad, line("two", split="heldout")))


def test_an_empty_source_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match='no line with "split": "train"'):
        read_source(write(tmp_path / "p.jsonl"))
    with pytest.raises(ValueError, match='no line with "split": "heldout"'):
        read_source(write(tmp_path / "q.jsonl", line("one")))


def test_duplicates_are_dropped_and_counted(tmp_path: Path):
    source = read_source(write(tmp_path / "p.jsonl", line("one"), line("One\n"), "", line("two", split="heldout")))
    assert source.duplicates == 1
    assert [p.messages[0]["content"] for p in source.splits["train"]] == ["one"]


def prompts_of(counts: dict[str, int]) -> list[Prompt]:
    return [
        Prompt(f"{c}{i}", "local", c, ({"role": "user", "content": "x"},)) for c, n in counts.items() for i in range(n)
    ]


def test_draws_are_as_even_as_the_categories_allow():
    drawn = draw_evenly(prompts_of({"a": 10, "b": 2, "c": 10}), 12, seed=0)
    assert Counter(p.category for p in drawn) == {"a": 5, "b": 2, "c": 5}
    assert drawn == draw_evenly(list(reversed(prompts_of({"a": 10, "b": 2, "c": 10}))), 12, seed=0)
    assert drawn != draw_evenly(prompts_of({"a": 10, "b": 2, "c": 10}), 12, seed=1)
    assert len(draw_evenly(prompts_of({"a": 3}), None, seed=0)) == 3


def test_splits_are_disjoint_even_and_repeatable(recipe_in: Callable[..., Recipe]):
    recipe = recipe_in()
    manifest = make_prompts(recipe)
    splits = {split: read_prompts(recipe.prompts_dir, split) for split in SPLITS}
    assert {split: len(prompts) for split, prompts in splits.items()} == {"train": 12, "validation": 4, "heldout": 4}
    assert len({p.id for prompts in splits.values() for p in prompts}) == 20
    assert set(Counter(p.category for p in splits["train"]).values()) == {3}
    assert make_prompts(recipe) == manifest  # complete: nothing is written again
    with pytest.raises(ArtefactError, match=r"settings\.seed: found 0, wanted 1"):
        make_prompts(recipe_in("prompts.seed=1"))


def test_another_max_train_keeps_the_validation_prompts(tmp_path: Path, recipe_in: Callable[..., Recipe]):
    recipes = [recipe_in(f"output_dir={tmp_path / n}", f"prompts.max_train={n}") for n in ("8", "16")]
    for recipe in recipes:
        make_prompts(recipe)
    first, second = (read_prompts(recipe.prompts_dir, "validation") for recipe in recipes)
    assert first == second


def test_too_much_validation_and_a_missing_file_are_refused(tmp_path: Path, recipe_in: Callable[..., Recipe]):
    source = write(tmp_path / "p.jsonl", line("one"), line("two", split="heldout"))
    with pytest.raises(ValueError, match=r"prompts\.validation 4 leaves nothing to train on: .* has 1 training"):
        make_prompts(recipe_in(f"prompts.path={source}"))
    with pytest.raises(FileNotFoundError, match=r"prompts\.path nowhere\.jsonl does not exist"):
        make_prompts(recipe_in("prompts.path=nowhere.jsonl"))


def test_the_recipe_ends_with_a_message_not_a_traceback(tmp_path: Path):
    result = run_python("data_gen/prompts.py", f"output_dir={tmp_path}", "prompts.path=nowhere.jsonl")
    assert result.returncode == 2
    assert "prompts.path nowhere.jsonl does not exist" in result.stderr
    assert "Traceback" not in result.stderr
