"""What a cycle trains on and what it holds out, from captured requests."""

import json
from collections import Counter

import pytest

from drafthead.adapting.rows import write_rows
from drafthead.artifacts import begin, finish
from drafthead.data.prompts import prompt_id, write_trained_on
from tests.adapting.records import captured, requests
from tests.artifacts import response, write_response_artifact
from tests.recipes import tiny_recipe


def rows_of(tmp_path, recipe, records, alarmed, known=()):
    path, head = tmp_path / "rows.jsonl", tmp_path / "head"
    begin(head, "head", {"target": {}})
    write_trained_on(head, known)
    finish(head, {})
    write_rows(path, recipe, records, alarmed, head)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def records():
    chat = captured(requests(100, 0.6, workload="chat"), seed=1)
    code = captured(requests(200, 0.5, workload="code", start=1000.0), seed=2)
    return [*chat, *code]


def test_the_newest_of_every_workload_is_held_out(tmp_path, records):
    rows = rows_of(tmp_path, tiny_recipe(tmp_path).changed("adapt", replay_share=0.0), records, alarmed=1000.0)
    heldout = [r for r in rows if r["split"] == "heldout"]
    assert Counter(r["category"] for r in heldout) == {"chat": 20, "code": 40}
    newest = {tuple(r["prompt_ids"]) for r in [*records[80:100], *records[260:]]}
    assert {tuple(r["prompt_ids"]) for r in heldout} == newest
    assert not any("response_ids" in r for r in heldout)  # the target answers them again
    train = [r for r in rows if r["split"] == "train"]
    assert Counter(r["category"] for r in train) == {"code": 160}
    assert not {tuple(r["prompt_ids"]) for r in train} & newest


def test_workloads_too_small_to_hold_one_out_are_held_out_from_together(tmp_path, records):
    recipe, single = tiny_recipe(tmp_path), [r | {"workload": f"user {i}"} for i, r in enumerate(records)]
    heldout = [r for r in rows_of(tmp_path, recipe, [*single[:200], *records[200:]], 1000.0) if r["split"] == "heldout"]
    assert Counter(r["category"] == "code" for r in heldout) == {False: 40, True: 20}


def test_what_a_head_was_trained_on_is_not_held_out(tmp_path, records):
    known = [prompt_id((), r["prompt_ids"]) for r in records[280:]]
    rows = rows_of(tmp_path, tiny_recipe(tmp_path), records, 1000.0, known)
    heldout = {prompt_id((), r["prompt_ids"]) for r in rows if r["split"] == "heldout"}
    assert len(heldout) == 60
    assert not heldout & set(known)


def test_old_text_is_replayed_beside_the_new(tmp_path, records):
    recipe = tiny_recipe(tmp_path).changed("adapt", replay_share=0.5)
    answers = [response(f"r{i}", 3, 2, ids=[5, 6, i, 7, 8], category="long") for i in range(100)]
    write_response_artifact(recipe.responses_dir("train"), answers)
    train = [r for r in rows_of(tmp_path, recipe, records, 1000.0) if r["split"] == "train"]
    counts = Counter(r["category"] for r in train)
    assert counts["code"] == counts["chat"] + counts["long"] == 160
    assert counts["long"] > 0
    assert all(r["response_ids"] for r in train)


def test_words_of_the_chat_template_make_no_overlap(tmp_path, records, tokenizer):
    start = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one two"}], add_generation_prompt=True, return_dict=False
    )
    records = [r | {"prompt_ids": [*start, *r["prompt_ids"]]} for r in records]
    rows = rows_of(tmp_path, tiny_recipe(tmp_path), records, 1000.0)
    for i, row in enumerate(rows):
        words = row["text_input"].split()
        breaks = [place for place, word in enumerate(words) if word == f"row{i}"]
        assert len(breaks) >= 3
        # No 13 words of the template in a row, alone or with what follows.
        assert max(after - before for before, after in zip([-1, *breaks[:5]], breaks, strict=False)) < 13
