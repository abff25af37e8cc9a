"""From files to splits: what is refused, what is dropped, and that draws are even and repeatable."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafthead.artifacts import ArtifactError
from drafthead.config import Recipe
from drafthead.data.prompts import SPLITS, Prompt, read_prompts
from drafthead.generation.prompts import draw_evenly, make_prompts
from tests.recipes import changed

SMALL = {"validation": 1, "max_train": None, "max_heldout": None}


def line(text: str, split: str | None = "train", **more: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}], **({"split": split} if split else {}), **more})


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines))
    return path


def test_duplicates_are_dropped_and_counted_and_held_out_wins(tmp_path: Path, recipe_in: Callable[..., Recipe]):
    lines = [line("one"), line("two"), line("One\n"), "", line("three", split="heldout"), line("Three")]
    recipe = changed(recipe_in(), "prompts", **SMALL, path=str(write(tmp_path / "p.jsonl", *lines)))
    assert make_prompts(recipe)["counts"]["duplicates_dropped"] == 2
    kept = {
        split: {p.messages[0]["content"].strip().lower() for p in read_prompts(recipe.prompts_dir, split)}
        for split in SPLITS
    }
    assert kept["train"] | kept["validation"] == {"one", "two"}
    assert kept["heldout"] == {"three"}


@pytest.mark.parametrize(("history", "trained"), [("regenerated", 2), ("given", 3)])
def test_no_first_turn_of_a_training_chat_is_held_out(
    history, trained, tmp_path: Path, recipe_in: Callable[..., Recipe]
):
    chat = [
        {"role": "user", "content": "Held?"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    rows = [line("one"), line("two"), json.dumps({"messages": chat, "split": "train"}), line("held?", split="heldout")]
    recipe = recipe_in(f"prompts.path={write(tmp_path / 'p.jsonl', *rows)}", f"responses.history={history}")
    counts = make_prompts(changed(recipe, "prompts", **SMALL))["counts"]
    assert counts["train"] + counts["validation"] == trained
    assert counts["duplicates_dropped"] == 3 - trained


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
    with pytest.raises(ArtifactError, match=r"settings\.seed: found 0, wanted 1"):
        make_prompts(recipe_in("prompts.seed=1"))


def test_another_max_train_keeps_the_validation_prompts(tmp_path: Path, recipe_in: Callable[..., Recipe]):
    recipes = [recipe_in(f"output_dir={tmp_path / n}", f"prompts.max_train={n}") for n in ("8", "16")]
    for recipe in recipes:
        make_prompts(recipe)
    first, second = (read_prompts(recipe.prompts_dir, "validation") for recipe in recipes)
    assert first == second


def test_too_much_validation_is_refused(tmp_path: Path, recipe_in: Callable[..., Recipe]):
    source = write(tmp_path / "p.jsonl", line("one"), line("two", split="heldout"))
    with pytest.raises(ValueError, match=r"prompts\.validation 4 leaves 0 of 1"):
        make_prompts(recipe_in(f"prompts.path={source}"))


def test_a_folder_of_several_files_is_no_single_file(tmp_path: Path, recipe_in: Callable[..., Recipe]):
    for name in "ab":
        write(tmp_path / "folder" / f"{name}.jsonl", line(name))
    with pytest.raises(ValueError, match=r"prompts\.path .*folder has 2 files.*prompts\.sources"):
        make_prompts(recipe_in(f"prompts.path={tmp_path / 'folder'}"))
