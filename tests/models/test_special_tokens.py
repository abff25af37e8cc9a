"""Which control tokens a target can generate."""

import shutil

from transformers import AutoTokenizer

from drafthead.config import load_recipe
from drafthead.models.special_tokens import special_tokens


def test_the_templates_control_tokens_are_found_and_reserved_ones_are_not():
    path = load_recipe().target_path
    special, emitted = special_tokens(path)
    names = set(AutoTokenizer.from_pretrained(path).convert_ids_to_tokens(sorted(emitted)))
    # <|return|> and <|call|> end a generation; the others stand in the template
    assert names == {"<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"}
    assert emitted < special


def test_tokens_that_the_template_writes_by_variable_count(tmp_path):
    target = tmp_path / "target"
    shutil.copytree(load_recipe().target_path, target)
    (target / "generation_config.json").unlink()
    (target / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    _, emitted = special_tokens(str(target))
    names = set(AutoTokenizer.from_pretrained(target).convert_ids_to_tokens(sorted(emitted)))
    assert names == {"<|startoftext|>", "<|return|>"}
