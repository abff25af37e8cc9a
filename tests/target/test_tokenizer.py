"""A target's tokenizer is loaded in one place, with all that the recipe says of it."""

import json
from pathlib import Path

import pytest

from drafthead.config import REPO_ROOT, Recipe, load_recipe
from drafthead.target.tokenizer import load_tokenizer, special_tokens, stop_tokens

CODE = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def with_code(target) -> Path:
    """A target whose tokenizer is a class of its own repository."""
    path = target / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    config = json.loads(path.read_text()) | {"tokenizer_class": "OwnTokenizer", "auto_map": auto_map}
    path.write_text(json.dumps(config))
    (target / "own.py").write_text(CODE)
    return target


def recipe_of(target: Path, *overrides: str) -> Recipe:
    return load_recipe(overrides=[f"target.path={target}", *overrides])


def test_code_of_the_repository_runs_only_where_the_recipe_says_so(with_code, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    trusting = recipe_of(with_code, "target.trust_remote_code=true")
    assert type(load_tokenizer(trusting)).__name__ == "OwnTokenizer"
    assert special_tokens(trusting) == special_tokens(load_recipe())
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(recipe_of(with_code))


def test_stops_are_the_tokenizers_and_those_of_generation_config(with_code):
    plain = load_tokenizer(load_recipe())
    both = stop_tokens(load_recipe(), plain)
    assert plain.eos_token_id in both
    assert len(both) > 1
    (with_code / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        stop_tokens(recipe_of(with_code), plain)
    (with_code / "generation_config.json").unlink()
    assert stop_tokens(recipe_of(with_code), plain) == {plain.eos_token_id}


def test_the_templates_control_tokens_are_found_and_reserved_ones_are_not():
    special, emitted = special_tokens(load_recipe())
    names = set(load_tokenizer(load_recipe()).convert_ids_to_tokens(sorted(emitted)))
    # <|return|> and <|call|> end a generation; the others stand in the template
    assert names == {"<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"}
    assert emitted < special


def test_tokens_that_the_template_writes_by_variable_count(target):
    (target / "generation_config.json").unlink()
    (target / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    recipe = recipe_of(target)
    names = set(load_tokenizer(recipe).convert_ids_to_tokens(sorted(special_tokens(recipe)[1])))
    assert names == {"<|startoftext|>", "<|return|>"}


def test_no_other_module_loads_a_tokenizer():
    loading = [p for p in (REPO_ROOT / "drafthead").rglob("*.py") if "AutoTokenizer.from_pretrained" in p.read_text()]
    assert [path.name for path in loading] == ["tokenizer.py"]
