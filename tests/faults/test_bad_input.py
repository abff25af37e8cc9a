"""Lines, texts and recipes of any kind give data or one clear error, nothing else."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from transformers import AutoTokenizer

from drafthead.config import DEFAULT_RECIPE, Recipe, load_recipe
from drafthead.data.prompts import Prompt, prompt_id, read_prompts
from drafthead.data.rendering import CONTROL_TOKEN, Renderer, UnrenderableError
from drafthead.generation.prompts import make_prompts, print_prompts

GOOD = [
    {"split": split, "messages": [{"role": "user", "content": f"question {i} of {split}"}]}
    for split in ("train", "heldout")
    for i in range(3)
]


def line_of(content: Any, role: Any = "user", **more: Any) -> bytes:
    return json.dumps({"split": "train", "messages": [{"role": role, "content": content}], **more}).encode()


def written(folder: Path, line: bytes) -> Recipe:
    """A recipe that reads six good lines, and this one."""
    path = folder / "p.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in GOOD) + line + b"\n")
    overrides = ("prompts.max_train=null", "prompts.max_heldout=null", "prompts.validation=1")
    return load_recipe(overrides=[f"output_dir={folder}", f"prompts.path={path}", *overrides])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (line_of("\ud800"), "Unicode"),
        (line_of("x", source="\udfff"), "Unicode"),
        (line_of("x", category="\ud800"), "Unicode"),
        (b'{"messages": "\xed\xa0\x80"}', "JSON"),
        (line_of("hello").decode().encode("utf-16"), "JSON"),
        (b"\0\0", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"split": "train", "prompt_ids": [' + b"9" * 5000 + b"]}", "JSON"),
        (b'{"split": "train", "prompt_ids": [4294967296]}', "token ids"),
        (line_of(""), "user"),
        (line_of("\u2003\n"), "user"),
        (line_of(float("nan")), "not text"),
        (line_of("x", "narrator"), "narrator"),
        (line_of("x", ["user"]), r"\['user'\]"),
        (b'{"split": "train", "messages": [7]}', "not an object"),
        (b'{"split": "train", "messages": {"role": "user"}}', "messages"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_and_can_be_mended(tmp_path, line, message):
    recipe = written(tmp_path, line)
    with pytest.raises(ValueError, match=r"p\.jsonl:7: .*" + message) as caught:
        make_prompts(recipe)
    str(caught.value).encode()  # can be printed
    assert not recipe.prompts_dir.exists()  # so that the mended file is read by the same command
    make_prompts(written(tmp_path, line_of("mended")))


def test_what_is_unusual_and_text_all_the_same_is_kept(tmp_path):
    texts = ["a\0b", "line\rend\u2028\x85", "word " * 210_000, "\ufeff\u202e\U0010ffff"]
    recipe = written(tmp_path, b"\n".join(map(line_of, texts)))
    manifest = make_prompts(recipe)
    print_prompts(recipe, manifest)
    prompts = [p for split in ("train", "validation") for p in read_prompts(recipe.prompts_dir, split)]
    assert set(texts) <= {p.messages[0]["content"] for p in prompts}


def test_names_of_data_are_never_paths(tmp_path):
    (tmp_path / "inside").mkdir()
    recipe = written(tmp_path / "inside", line_of("x", category="../../escaped", source="/etc"))
    print_prompts(recipe, make_prompts(recipe))
    assert [p.name for p in tmp_path.iterdir()] == ["inside"]


TOKENIZER = AutoTokenizer.from_pretrained(load_recipe().target_path)
RENDER = Renderer(TOKENIZER)
CONTROL = {i: t.content for i, t in TOKENIZER.added_tokens_decoder.items() if t.special}
PIECES = [
    *CONTROL.values(), "<|", "|>", "<|en", "d|>", "<|start|", "assistant", "final", "<｜end｜>", "＜|end|＞", " ", "\n",
]  # fmt: skip


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=8), min_size=1, max_size=6), st.sampled_from(["user", "system"])
)
def test_text_never_becomes_a_control_token(parts, role):
    """Either the prompt is left out with that reason, or its ids say exactly the template's text around it."""
    text = "".join(parts)
    asked = {"role": "user", "content": "x"}
    messages = ({"role": role, "content": text}, asked)
    held = any(token in text for token in CONTROL.values())
    prompt = Prompt(prompt_id(messages), "s", "c", messages)
    if held:
        with pytest.raises(UnrenderableError, match=CONTROL_TOKEN):
            RENDER(prompt, "low")
        return
    ids = RENDER(prompt, "low")
    plain = RENDER(Prompt("p", "s", "c", ({"role": role, "content": "y"}, asked)), "low")
    assert [i for i in ids if i in CONTROL] == [i for i in plain if i in CONTROL]
    wanted = TOKENIZER.apply_chat_template(
        list(messages), add_generation_prompt=True, reasoning_effort="low", tokenize=False
    )
    assert TOKENIZER.decode(ids) == wanted
    assert text.strip() in wanted


def keys_of(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, field in model.model_fields.items():
        found.append((*prefix, name))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += keys_of(field.annotation, (*prefix, name))
    return found


ODD = [
    "${train}", "${oc.env:HOME}", "???", "${", "\x00", "../..", "[", "{a", "1e400", "!!python/name:os.system",
    float("nan"),
]  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(ODD)
scalars = scalars | st.dates(max_value=date(9999, 1, 1)) | st.binary(max_size=3)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3), max_leaves=5
)
KEYS = st.sampled_from(keys_of(Recipe))
BASE = yaml.safe_load(DEFAULT_RECIPE.read_text())


def loads_or_says_why(*arguments: Any, **options: Any) -> None:
    try:
        load_recipe(*arguments, **options)
    except ValueError as error:
        named = type(error) is ValueError and re.match("(recipe|override) ", str(error))
        if not named:  # a subclass is a library's own
            raise


@settings(max_examples=80)
@given(KEYS, values)
def test_any_value_in_a_recipe_loads_or_is_named(tmp_path_factory, key, value):
    content = yaml.safe_load(yaml.safe_dump(BASE))
    section = content
    for name in key[:-1]:
        section = section.setdefault(name, {})
    section[key[-1]] = value
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    loads_or_says_why(path)


@settings(max_examples=80)
@given(st.binary(max_size=30) | values.map(lambda value: yaml.safe_dump(value).encode()))
def test_any_file_is_a_recipe_or_says_why_not(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(content)
    loads_or_says_why(path)


@settings(max_examples=80)
@given(
    KEYS,
    st.sampled_from(["", "x", "[0]", ".", "..a"]),
    st.text(max_size=8) | st.sampled_from(["\ud800", "{a: ", *map(str, ODD)]),
)
def test_any_override_applies_or_is_named(key, ending, text):
    loads_or_says_why(overrides=[f"{'.'.join(key)}{ending}={text}"])


@pytest.mark.parametrize("value", [".inf", ".nan", "-.inf"])
def test_a_number_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="train.learning_rate: Input should be"):
        load_recipe(overrides=[f"train.learning_rate={value}"])
