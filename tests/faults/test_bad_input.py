"""Lines, texts and recipes of any kind give data or one clear error, nothing else."""

import re
from datetime import date
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from transformers import AutoTokenizer

from drafthead.config import DEFAULT_RECIPE, Recipe, load_recipe
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.data.rendering import CONTROL_TOKEN, Renderer, UnrenderableError

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
    expected = TOKENIZER.apply_chat_template(
        list(messages), add_generation_prompt=True, reasoning_effort="low", tokenize=False
    )
    assert TOKENIZER.decode(ids) == expected
    assert text.strip() in expected


def keys_of(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append((*prefix, name))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += keys_of(field.annotation, (*prefix, name))
    return keys


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
