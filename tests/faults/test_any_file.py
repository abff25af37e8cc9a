"""Files that others made may hold anything: they are read, or refused in one message that names them."""

import contextlib
import io
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.cli import run_recipe
from drafthead.config.recipe import PromptSource
from drafthead.drafters.vllm import check_files
from drafthead.exporting.importing import import_head
from drafthead.generation.prompts import gather
from drafthead.generation.sources import locate
from drafthead.target.pieces import load_pieces, load_target_spec, model_config
from drafthead.target.tokenizer import special_tokens
from tests.exporting.runs import recipe_at
from tests.recipes import tiny_recipe

Damage = Callable[[bytes], bytes]

_ODD = [
    "", "x", "../x", "/x", "\ud800", "[/x]", "{{ 1 }}", 2**31, 2**63, -(2**63) - 1, 1e308, float("nan"), [[]], {"": {}},
]  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(_ODD)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Where the parts of a JSON value stand; of a long list the first ones."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


@st.composite
def another_part(draw: st.DrawFn) -> Callable[[Any], Any]:
    """One part of a JSON value is another, or missing."""
    place, new, missing = draw(st.floats(0, 0.999)), draw(values), draw(st.booleans())

    def change(value: Any) -> Any:
        found = sorted(places(value), key=len)  # what stands higher is met more often
        *above, key = found[int(place**2 * len(found))] or (None,)
        if key is None:
            return new
        parent = value
        for step in above:
            parent = parent[step]
        if missing:
            del parent[key]
        else:
            parent[key] = new
        return value

    return change


def as_json(change: Callable[[Any], Any]) -> Damage:
    return lambda content: json.dumps(change(json.loads(content))).encode("utf-8", "surrogatepass")


@st.composite
def other_bytes(draw: st.DrawFn) -> Damage:
    """Bytes are replaced, put in or taken away."""
    place, new, taken = draw(st.floats(0, 1)), draw(st.binary(max_size=6)), draw(st.sampled_from([0, 1, 6, 10**9]))

    def damage(content: bytes) -> bytes:
        at = int(place * len(content))
        return content[:at] + new + content[at + taken :]

    return damage


anything = another_part().map(as_json) | other_bytes()


def header(damage: Damage) -> Damage:
    """Of a safetensors file: what says where its tensors are."""

    def change(content: bytes) -> bytes:
        (size,) = struct.unpack("<Q", content[:8])
        new = damage(content[8 : 8 + size])
        return struct.pack("<Q", len(new)) + new + content[8 + size :]

    return change


tensors = anything.map(header) | other_bytes()


def read_or_refused(read: Callable[[], object], path: Path, or_else: str = "\0") -> None:
    """What `run_recipe` takes for a bug leaves it as an exception; a refusal names the file, or says something else."""
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            run_recipe(lambda: read() and None)
        except SystemExit as end:
            code = end.code
    assert code in (0, 2)
    message = said.getvalue()
    assert not code or str(path) in message or or_else in message, message


# Prompts

_KEYS = [
    "messages", "conversations", "prompt", "prompt_ids", "response_ids", "turns", "tools", "split", "category", "id",
]  # fmt: skip
GOOD = [
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes", "tool_calls": [{}]}]},
    {"prompt": "what", "category": "chat", "split": "train", "tools": [{"name": "x"}]},
    {"prompt_ids": [1, 2, 3], "response_ids": [4], "id": "a"},
]
rows = st.sampled_from(range(3)).flatmap(lambda i: another_part().map(lambda c: c(json.loads(json.dumps(GOOD[i])))))
rows = rows | st.dictionaries(st.sampled_from(_KEYS), values, max_size=3)


def read_prompts_of(path: Path) -> None:
    read_or_refused(lambda: gather(locate(PromptSource(name="mine", path=str(path), train=5)), 0), path)


@settings(max_examples=100)
@given(st.lists(rows, max_size=3), st.none() | other_bytes(), st.sampled_from(["jsonl", "json"]))
def test_json_of_prompts(tmp_path_factory, found, damage, kind):
    path = tmp_path_factory.getbasetemp() / f"p.{kind}"
    content = json.dumps(found) if kind == "json" else "\n".join(map(json.dumps, found))
    path.write_bytes(damage(content.encode()) if damage else content.encode())
    read_prompts_of(path)


columns = st.dictionaries(
    st.sampled_from(_KEYS),
    st.sampled_from([
        ["x", None], [1, 2**40], [1.5, None], [[1, 2], []], [["a"], None], [{"role": "user"}, None],
        [[{"role": "user", "content": "x"}], [{"role": "x", "content": "y"}]], [b"\xff", b"x"], [None, None],
    ]),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=40)
@given(columns, st.none() | other_bytes())
def test_parquet_of_prompts(tmp_path_factory, found, damage):
    path = tmp_path_factory.getbasetemp() / "p.parquet"
    pq.write_table(pa.table(found), path)
    path.write_bytes(damage(path.read_bytes()) if damage else path.read_bytes())
    read_prompts_of(path)


# Targets, tokenizers and tensors


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return shutil.copytree(tiny_recipe("/tmp").target_path, tmp_path_factory.mktemp("any") / "target")


@contextlib.contextmanager
def damaged(path: Path, damage: Damage) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(damage(before))
    try:
        yield
    finally:
        path.write_bytes(before)


# What reads each file of a target.
READERS = {
    "config.json": lambda recipe: (load_target_spec(recipe.target_path), model_config(recipe)),
    "model.safetensors": lambda recipe: load_pieces(recipe.target_path),
    **dict.fromkeys(("tokenizer.json", "tokenizer_config.json", "generation_config.json"), special_tokens),
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=30)
@given(st.data())
def test_any_file_of_a_target(target, name, data):
    recipe = tiny_recipe("/tmp", f"target.path={target}")
    with damaged(target / name, data.draw(tensors if name == "model.safetensors" else anything)):
        read_or_refused(lambda: READERS[name](recipe), target)


@settings(max_examples=40)
@given(st.tuples(st.just("config.json"), anything) | st.tuples(st.just("model.safetensors"), tensors))
def test_any_head(head, tmp_path_factory, damage):
    recipe = recipe_at(tmp_path_factory.mktemp("imported"))
    spec = load_target_spec(recipe.target_path)
    with damaged(head / damage[0], damage[1]):
        read_or_refused(lambda: check_files(head, spec), head)
        read_or_refused(lambda: import_head(recipe, str(head)), head, "the recipe describes another head")
