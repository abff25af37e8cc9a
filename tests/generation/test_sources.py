"""Sources: every adapter on its published schema, local files of each kind, and where a source is looked for."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from drafthead.config import recipe
from drafthead.config.recipe import PromptSource
from drafthead.data.prompts import Prompt, RowError
from drafthead.generation.prompts import Pool, gather
from drafthead.generation.sources import CATALOGUE, download_command, find, locate, read, read_row
from tests.artifacts import cached_snapshot
from tests.generation.published_rows import PUBLISHED, write_rows


def pool_of(name: str, path: Path, **settings: Any) -> Pool:
    return gather(locate(PromptSource(name=name, path=str(path), **settings)), seed=0)


def prompts_of(pool: Pool) -> list[Prompt]:
    return [candidate.prompt for candidate in [*pool.train, *pool.heldout]]


def by_text(pool: Pool) -> dict[str, Prompt]:
    """Prompts by their last message."""
    return {prompt.messages[-1]["content"]: prompt for prompt in prompts_of(pool) if prompt.messages}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_become_prompts(name, tmp_path):
    published = PUBLISHED[name]
    pool = pool_of(name, write_rows(tmp_path / f"rows{published.extension}", published.rows))
    prompts = prompts_of(pool)
    assert not pool.refused
    assert len(prompts) == len({p.id for p in prompts}) == len(published.rows)
    assert {p.source for p in prompts} == {name}
    assert published.category in {p.category for p in prompts}
    if name == "mlperf-gpt-oss":  # ids as they are
        assert {p.prompt_ids for p in prompts} == {(200006, 1428, 7), (200006, 1428, 8)}
        assert all(c.text.startswith("<|start|>user") for c in [*pool.train, *pool.heldout])
    elif name == "burstgpt":  # as many words as the trace has tokens
        assert {len(p.messages[-1]["content"].split()) for p in prompts} == {4}
    else:
        prompt = by_text(pool)[published.prompt]
        assert prompt.document == published.document or published.document is None
        assert prompt.messages[-1]["role"] == "user"


def test_speed_bench_leaves_out_questions_published_without_their_text(tmp_path):
    marker = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    withheld = [{"question_id": f"x{i}", "category": "qa", "turns": [marker]} for i in range(3)]  # more than half
    rows = [*PUBLISHED["speed-bench"].rows, *withheld]
    pool = pool_of("speed-bench", write_rows(tmp_path / "qualitative.jsonl", rows))
    assert len(pool.heldout) == 2
    assert "prepare_data.py" in str(pool.refused)


OWN = [
    ({"messages": [{"role": "user", "content": "a"}]}, "a"),
    ({"conversations": [{"from": "human", "value": "b"}]}, "b"),
    ({"prompt": "c", "category": "mine"}, "c"),
    ({"question": "2020-01-01 00:00:00"}, "2020-01-01 00:00:00"),  # stays a text
    ({"instruction": "e", "input": "f"}, "e\n\nf"),
    ({"turns": ["g", "h"], "question_id": 1}, "g"),
    ({"problem_statement": "i", "repo": "r"}, "i"),
    ({"messages": [{"role": "user", "content": [{"text": "j"}]}]}, "j"),  # another type than in the rows above
    ({"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "k"}], "split": "train"}, "k"),
]


@pytest.mark.parametrize("extension", [".jsonl", ".json"])
def test_a_file_of_ones_own_is_read_by_the_usual_columns(tmp_path, extension):
    rows = [row for row, _ in OWN] + [{"prompt_ids": [1, 2]}, {"input_ids": "[3, 4]"}]
    pool = pool_of("mine", write_rows(tmp_path / f"own{extension}", rows))
    assert set(by_text(pool)) == {text for _, text in OWN}
    assert {p.prompt_ids for p in prompts_of(pool)} == {None, (1, 2), (3, 4)}
    assert {p.category for p in prompts_of(pool)} == {"all", "mine"}
    assert by_text(pool)["i"].document == "mine:r"


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".csv.gz"])
def test_local_files_of_every_kind_are_read(tmp_path, extension):
    rows = [{"prompt": "a", "id": "1"}, {"prompt": 'b, "c"\nd', "id": "2"}, {"prompt": "NA", "id": "3"}]
    plain = tmp_path / f"own [1]{extension.removesuffix('.gz')}"  # to `datasets` a pattern
    path = write_rows(plain, rows)
    if extension.endswith(".gz"):
        path = tmp_path / f"own{extension}"
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    texts = {row["prompt"] for row in rows}
    assert set(by_text(pool_of("mine", path))) == set(by_text(pool_of("mine", tmp_path))) == texts  # the folder, too


def test_the_system_prompt_of_a_row_comes_before_its_chat(tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": "a"}], "system": "b"},
        {"prompt": "c", "system": "d"},
        {"messages": [{"role": "user", "content": "e"}], "prompt": "e"},  # UltraChat's form
    ]
    prompts = prompts_of(pool_of("mine", write_rows(tmp_path / "own.jsonl", rows)))
    assert sorted([m["content"] for m in prompt.messages] for prompt in prompts) == [["b", "a"], ["d", "c"], ["e"]]
    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="system would not be read"):
        pool_of("mine", write_rows(tmp_path / "own.jsonl", [{"messages": chat, "system": "y"}]))


ASK, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def completion(message: Any = ANSWER, reason: str | None = "stop", **more: Any) -> dict[str, Any]:
    """A response of /v1/chat/completions, as servers write it."""
    choice = {"index": 0, "message": {"refusal": None, "annotations": [], **message}, "finish_reason": reason}
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
        "usage": {"prompt_tokens": 1}, **more,
    }  # fmt: skip


BODY = {"model": "m", "messages": [ASK], "max_tokens": 9, "temperature": 0.5}
SENT = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
RETURNED = {"id": "batch_1", "custom_id": "1", "error": None, "body": BODY}
TOOL = {"name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("row", "response", "repairs"),
    [
        ({**completion(), "messages": [ASK]}, ANSWER, 0),
        ({**completion(reason="length"), "messages": [ASK]}, {**ANSWER, "finish_reason": "length"}, 0),
        ({**completion({"content": "b", "reasoning": "t"}), "messages": [ASK]}, {**ANSWER, "thinking": "t"}, 0),
        ({**completion({"content": None, "refusal": "b"}), "messages": [ASK]}, ANSWER, 0),
        ({**completion({"content": None, "reasoning": "t"}, "length"), "messages": [ASK]}, None, 1),
        ({**completion(choices=[]), "messages": json.dumps([ASK])}, None, 1),
        ({**completion(), "choices": completion()["choices"] * 2, "messages": [ASK]}, ANSWER, 1),
        (SENT, None, 0),
        ({**SENT, "body": BODY | {"chat_template_kwargs": {"enable_thinking": False}}}, None, 1),
        ({**RETURNED, "response": {"status_code": 200, "request_id": "r", "body": completion()}}, ANSWER, 0),
        ({**RETURNED, "response": completion()}, ANSWER, 0),
        ({**RETURNED, "response": {"status_code": 500, "body": {"error": {}}}}, None, 1),
        ({**RETURNED, "response": None, "error": {"message": "expired"}}, None, 1),
        ({"prompt": "a", "completion": "b"}, ANSWER, 0),
        ({"prompt": [ASK], "completion": [ANSWER]}, ANSWER, 0),
        ({"instruction": "a", "input": "", "output": "b"}, ANSWER, 0),
        ({"question": "a", "response": ANSWER}, ANSWER, 0),
        ({"prompt": "a", "response": ""}, None, 0),
        ({"messages": [ASK, ANSWER], "response": "b"}, ANSWER, 0),
    ],
)
def test_a_log_or_a_row_with_its_response_is_a_prompt_and_that_response(tmp_path, row, response, repairs):
    pool = pool_of("mine", write_rows(tmp_path / "own.jsonl", [row]))
    (prompt,) = prompts_of(pool)
    assert (prompt.messages, prompt.response) == ((ASK,), response)
    assert pool.repaired.total() == repairs
    assert set(pool.repaired) <= set(pool.examples)


def test_logged_turns_of_one_chat_are_one_document_with_their_tools():
    first = read_row({**completion(), "messages": [ASK], "tools": [TOOL], "category": "c"}, "mine")
    second = read_row({**completion(id="chatcmpl-2"), "messages": [ASK, ANSWER, ASK]}, "mine")
    assert first.document == second.document
    assert (first.tools, first.category) == ((TOOL,), "c")
    old = read_row({"messages": [ASK, ANSWER], "functions": [TOOL], "parallel_tool_calls": False}, "mine")
    batch = read_row({**SENT, "body": {**BODY, "functions": [TOOL]}}, "mine")
    assert old.tools == batch.tools == ({"type": "function", "function": TOOL},)


@pytest.mark.parametrize("column", ["document", "category", "source"])
def test_a_zero_is_a_name(column):
    assert getattr(read_row({"prompt": "a", column: 0}, "mine"), column) == "0"


def test_tools_and_the_response_travel_with_the_prompt(tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "default": None}}]
    messages = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = [{"messages": messages, "tools": json.dumps(tools)}, {"messages": messages, "tools": [{"name": "g"}]}]
    prompts = prompts_of(pool_of("mine", write_rows(tmp_path / "own.jsonl", rows)))
    assert sorted([p.tools for p in prompts], key=str) == [({"name": "g"},), tuple(tools)]
    assert all(p.response == {"role": "assistant", "content": "b"} for p in prompts)


def test_parquet_gives_no_row_the_keys_of_other_rows_tools(tmp_path):
    tools = [[{"name": "f", "parameters": {key: {"type": "string"}}}] for key in ("city", "symbol")]
    rows = [{"messages": [{"role": "user", "content": str(i)}], "tools": one} for i, one in enumerate(tools)]
    prompts = prompts_of(pool_of("mine", write_rows(tmp_path / "own.parquet", rows)))
    assert sorted([list(p.tools) for p in prompts], key=str) == tools


def test_a_few_bad_rows_of_a_public_data_set_are_counted_not_fatal(tmp_path):
    rows = [{"question": f"question {i}"} for i in range(9)] + [{"question": "\ud800"}]
    pool = pool_of("gsm8k", write_rows(tmp_path / "rows.jsonl", rows))
    (reason,) = pool.refused
    assert "lone surrogate" in reason
    assert pool.examples[reason].endswith("rows.jsonl:10")


def test_json_of_one_object_per_line_is_read(tmp_path):
    (tmp_path / "lines.json").write_text('\ufeff{"prompt": "a"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    assert [row["prompt"] for _, row in read(tmp_path / "lines.json")] == ["a", "b"]


@pytest.mark.parametrize("other", ["other", "train-easy-00000-of-00001", "../more/train-00000-of-00002"])
def test_a_missing_shard_is_noticed(tmp_path, other):
    for name in ("train-00000-of-00002", other):
        write_rows(tmp_path / "data" / f"{name}.parquet", [{"prompt": "a"}])
    with pytest.raises(ValueError, match="has 1 of the 2 files of .*train-00000-of-00002"):
        find(tmp_path, ["*/train-*.parquet"])


def test_what_looks_like_a_number_in_csv_is_a_text(tmp_path):
    (tmp_path / "own.csv").write_text('prompt,category,prompt_ids\n2020,007\n,,"[1, 2]"\n')
    prompts = prompts_of(pool_of("mine", tmp_path / "own.csv"))
    assert {(p.category, p.prompt_ids) for p in prompts} == {("007", None), ("all", (1, 2))}
    assert [p.messages[0]["content"] for p in prompts if p.messages] == ["2020"]
    (tmp_path / "own.csv").write_text("prompt\na,b\n")
    with pytest.raises(ValueError, match="more cells"):
        list(read(tmp_path / "own.csv"))


@pytest.fixture
def no_network(hub_cache, monkeypatch, tmp_path):
    """A folder that stands for a machine: `hub`, its cache of the hub, and `checkout`."""
    monkeypatch.setattr(recipe, "REPO_ROOT", tmp_path / "checkout")
    return tmp_path


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_missing_source_names_the_command_that_gets_it(name, no_network):
    with pytest.raises(FileNotFoundError) as caught:
        locate(PromptSource(name=name))
    command = download_command(name, CATALOGUE[name])
    assert command in str(caught.value)
    hub = CATALOGUE[name].hub
    assert f"hf download {hub} --repo-type dataset --include " in command if hub else "curl" in command


def test_a_download_that_breaks_names_the_command(monkeypatch):
    class BrokenError(Exception):
        """As httpx2's, which are no OSError; some have no text."""

    def fetch(*_, **__):
        raise BrokenError

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(FileNotFoundError, match=r"sharegpt is not on this machine \(BrokenError\)[\s\S]*hf download"):
        locate(PromptSource(name="sharegpt"))


def test_hidden_files_of_a_folder_are_no_data(tmp_path):
    for name in ("a.jsonl", "._a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", ".cache/huggingface/trees/c.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert find(tmp_path, ("*",)) == [tmp_path / "a.jsonl"]


def test_the_hubs_cache_is_read_without_a_network(no_network):
    snapshot = cached_snapshot(no_network / "hub", "datasets--princeton-nlp--SWE-bench", "c0ffee") / "data"
    rows = PUBLISHED["swe-bench"].rows
    write_rows(snapshot / "train-00000-of-00001.parquet", rows[:1])
    with pytest.raises(FileNotFoundError, match="swe-bench"):
        locate(PromptSource(name="swe-bench"))  # the test split is missing
    write_rows(snapshot / "test-00000-of-00001.parquet", rows[1:])
    located = locate(PromptSource(name="swe-bench", train=1))
    assert located.identity["commit"] == "c0ffee"
    pool = gather(located, seed=0)
    assert [[c.prompt.messages[-1]["content"] for c in side] for side in (pool.train, pool.heldout)] == [
        ["It breaks 0."],
        ["It breaks 1."],
    ]


def test_a_source_in_the_checkout_is_found(no_network):
    rows = PUBLISHED["spec-bench"].rows
    write_rows(no_network / "checkout" / "data" / "sources" / "spec-bench" / "question.jsonl", rows)
    assert len(gather(locate(PromptSource(name="spec-bench")), seed=0).heldout) == 2


def test_a_change_in_any_file_of_a_folder_changes_its_identity(tmp_path):
    identities = []
    for text in "ab":
        for folder, prompt in (("1", text), ("2", "the same")):
            write_rows(tmp_path / folder / "own.jsonl", [{"prompt": prompt}])
        identities.append(locate(PromptSource(name="mine", path=str(tmp_path))).identity)
    assert identities[0] != identities[1]


def test_unknown_names_and_paths_are_refused(no_network):
    with pytest.raises(ValueError, match=r"sharegtp.*sharegpt, mlperf-gpt-oss,"):
        locate(PromptSource(name="sharegtp"))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json .*sharegpt"):
        locate(PromptSource(name="sharegpt", path="nowhere.json"))
    with pytest.raises(ValueError, match=r"own\.parquet\.gz: the extension must be"):
        list(read(Path("own.parquet.gz")))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("burstgpt", {"Request tokens": "text", "Response tokens": 3}),
        ("burstgpt", {"Request tokens": {"a": 1}, "Response tokens": 3}),
        ("burstgpt", {"Request tokens": 3, "Response tokens": float("inf")}),
        ("speed-bench", {"turns": True}),
        ("instruct-coder", {"input": 1.5}),
    ],
)
def test_a_row_of_another_file_is_refused_under_the_name_of_a_data_set(name, row):
    with pytest.raises(RowError):
        read_row(row, name)
