"""Sources: every adapter on its published schema, local files of each kind, and where a source is looked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafthead.config import PromptSource
from drafthead.generation.sources import locate as module
from drafthead.generation.sources.adapters import SchemaError
from drafthead.generation.sources.catalogue import CATALOGUE
from drafthead.generation.sources.files import find, read
from drafthead.generation.sources.gather import Pool, gather
from drafthead.generation.sources.locate import download_command, locate
from tests.artefacts import cached_snapshot
from tests.generation.published_rows import PUBLISHED, write_rows


def pool_of(name: str, path: Path, **settings: Any) -> Pool:
    return gather(locate(PromptSource(name=name, path=str(path), **settings)), seed=0, limit=None)


def everything(pool: Pool) -> dict[str, Any]:
    """Prompts by the text of their last message."""
    return {c.prompt.messages[-1]["content"]: c.prompt for c in [*pool.train, *pool.heldout] if c.prompt.messages}


def test_every_known_source_has_rows_to_be_tested_on():
    assert set(PUBLISHED) == set(CATALOGUE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_become_prompts(name, tmp_path):
    published = PUBLISHED[name]
    pool = pool_of(name, write_rows(tmp_path / f"rows{published.extension}", published.rows))
    prompts = [c.prompt for c in [*pool.train, *pool.heldout]]
    assert not pool.refused
    assert len(prompts) == len({p.id for p in prompts}) == len(published.rows)
    assert {p.source for p in prompts} == {name}
    assert published.category in {p.category for p in prompts}
    if name == "mlperf-gpt-oss":  # ids as they are
        assert {p.prompt_ids for p in prompts} == {(200006, 1428, 7), (200006, 1428, 8)}
        assert all(c.text.text.startswith("<|start|>user") for c in [*pool.train, *pool.heldout])
    elif name == "burstgpt":  # as many words as the trace has tokens
        assert {len(p.messages[-1]["content"].split()) for p in prompts} == {4}
    else:
        prompt = everything(pool)[published.asked]
        assert prompt.document == published.document or published.document is None
        assert prompt.messages[-1]["role"] == "user"


def test_pieces_of_one_shared_chat_stay_together(tmp_path):
    pool = pool_of("sharegpt", write_rows(tmp_path / "s.json", PUBLISHED["sharegpt"].rows))
    assert {c.prompt.document for c in [*pool.train, *pool.heldout]} == {"sharegpt:QWJhYvA"}
    assert not (pool.train and pool.heldout)


def test_burstgpt_is_read_by_column_name_and_leaves_out_failures(tmp_path):
    old = [{"Request tokens": 3, "Timestamp": 1, "Response tokens": n, "Model": "GPT-4"} for n in (5, 0, 7)]
    pool = pool_of("burstgpt", write_rows(tmp_path / "b.csv", old))
    assert len(pool.heldout) == 2
    assert pool.refused == {"a failed request": 1}


OWN = [
    ({"messages": [{"role": "user", "content": "a"}]}, "a"),
    ({"conversations": [{"from": "human", "value": "b"}]}, "b"),
    ({"prompt": "c", "category": "mine"}, "c"),
    ({"question": "d"}, "d"),
    ({"instruction": "e", "input": "f"}, "e\n\nf"),
    ({"turns": ["g", "h"], "question_id": 1}, "g"),
    ({"problem_statement": "i", "repo": "r"}, "i"),
]


def test_a_file_of_ones_own_is_read_by_the_usual_columns(tmp_path):
    rows = [row for row, _ in OWN] + [{"prompt_ids": [1, 2]}, {"input_ids": "[3, 4]"}]
    pool = pool_of("mine", write_rows(tmp_path / "own.jsonl", rows))
    assert set(everything(pool)) == {asked for _, asked in OWN}
    assert {c.prompt.prompt_ids for c in [*pool.train, *pool.heldout]} == {None, (1, 2), (3, 4)}
    assert {p.category for p in everything(pool).values()} == {"all", "mine"}
    assert everything(pool)["i"].document == "mine:r"


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".parquet", ".csv"])
def test_local_files_of_every_kind_are_read(tmp_path, extension):
    path = write_rows(tmp_path / f"own{extension}", [{"prompt": "a", "id": "1"}, {"prompt": 'b, "c"\nd', "id": "2"}])
    assert set(everything(pool_of("mine", path))) == {"a", 'b, "c"\nd'}
    assert set(everything(pool_of("mine", tmp_path))) == {"a", 'b, "c"\nd'}  # the folder


def test_tools_travel_with_the_prompt(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": [{"role": "user", "content": "a"}], "tools": json.dumps(tools)}]
    (candidate,) = pool_of("mine", write_rows(tmp_path / "own.jsonl", rows)).train
    assert candidate.prompt.tools == tuple(tools)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": ', r"own\.jsonl:2: not JSON in UTF-8"),
        (b'{"prompt": "\xff"}', r"own\.jsonl:1: not JSON in UTF-8"),
        (b"[1]\n", r"own\.jsonl:1: found \[1\], wanted an object"),
        (b'{"prompt": {"a": 1}}\n', r"1 of 1 rows of mine are no conversations, such as .*own\.jsonl:1: .*not text"),
        (b'{"promt": "a"}\n', r"no column prompt or question or problem_statement or text; found: promt"),
        (b"\n", r"mine has no rows"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "own.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        pool_of("mine", tmp_path / "own.jsonl")


def test_a_few_bad_rows_are_counted_not_fatal(tmp_path):
    rows = [{"prompt": f"question {i}"} for i in range(9)] + [{"prompt": "\ud800"}]
    pool = pool_of("mine", write_rows(tmp_path / "own.jsonl", rows))
    (reason,) = pool.refused
    assert "lone surrogate" in reason
    assert pool.examples[reason].endswith("own.jsonl:10")


def test_lines_of_a_megabyte_are_read(tmp_path):
    rows = [{"prompt": f"{i} " + "word " * 250_000} for i in range(3)]
    assert len(everything(pool_of("mine", write_rows(tmp_path / "own.jsonl", rows)))) == 3


def test_json_of_one_object_per_line_is_read_and_other_extensions_refused(tmp_path):
    (tmp_path / "lines.json").write_text('\ufeff{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    assert [row["prompt"] for _, row in read(tmp_path / "lines.json")] == ["a", "b"]
    with pytest.raises(ValueError, match=r"the extension must be one of \.jsonl"):
        list(read(tmp_path / "rows.txt"))


def test_a_missing_shard_is_noticed(tmp_path):
    write_rows(tmp_path / "data" / "train-00000-of-00002.parquet", [{"prompt": "a"}])
    with pytest.raises(ValueError, match="has 1 of the 2 files of data/train-00000-of-00002"):
        find(tmp_path, ["data/train-*.parquet"])


@pytest.fixture
def no_network(hub_cache, monkeypatch, tmp_path):
    """A folder that stands for a machine: `hub`, its cache of the hub, and `checkout`."""
    monkeypatch.setattr(module, "REPO_ROOT", tmp_path / "checkout")
    return tmp_path


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_missing_source_says_what_to_run(name, no_network):
    with pytest.raises(FileNotFoundError) as caught:
        locate(PromptSource(name=name))
    assert download_command(name, CATALOGUE[name]) in str(caught.value)
    hub = CATALOGUE[name].hub
    assert (
        f"hf download {hub} --repo-type dataset --include " in str(caught.value) if hub else "curl" in str(caught.value)
    )


def test_the_hubs_cache_is_read_without_a_network(no_network):
    snapshot = cached_snapshot(no_network / "hub", "datasets--princeton-nlp--SWE-bench", "c0ffee") / "data"
    rows = PUBLISHED["swe-bench"].rows
    write_rows(snapshot / "train-00000-of-00001.parquet", rows[:1])
    with pytest.raises(FileNotFoundError, match="swe-bench is not on this machine"):
        locate(PromptSource(name="swe-bench"))  # the test split is missing
    write_rows(snapshot / "test-00000-of-00001.parquet", rows[1:])
    located = locate(PromptSource(name="swe-bench", train=1))
    assert located.identity["commit"] == "c0ffee"
    pool = gather(located, seed=0, limit=None)
    assert [c.prompt.messages[-1]["content"] for c in pool.train] == ["It breaks 0."]
    assert [c.prompt.messages[-1]["content"] for c in pool.heldout] == ["It breaks 1."]


def test_a_source_in_the_checkout_is_found(no_network):
    rows = PUBLISHED["spec-bench"].rows
    write_rows(no_network / "checkout" / "data" / "sources" / "spec-bench" / "question.jsonl", rows)
    assert len(gather(locate(PromptSource(name="spec-bench")), seed=0, limit=None).heldout) == 2


def test_unknown_names_and_paths_are_refused(no_network):
    with pytest.raises(ValueError, match=r"sharegtp is not a known source \(sharegpt, mlperf-gpt-oss,"):
        locate(PromptSource(name="sharegtp"))
    with pytest.raises(FileNotFoundError, match=r"path nowhere\.json of sharegpt does not exist"):
        locate(PromptSource(name="sharegpt", path="nowhere.json"))


def test_another_data_set_under_a_known_name_is_refused(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [{"question": "a"}])
    with pytest.raises(ValueError, match=r"1 of 1 rows of swe-bench .*no column problem_statement; found: question"):
        pool_of("swe-bench", path)
    with pytest.raises(SchemaError):
        CATALOGUE["swe-bench"].adapter({"question": "a"})
