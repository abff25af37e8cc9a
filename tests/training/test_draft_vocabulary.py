"""The draft vocabulary of a run: by count or by coverage, with the template's control tokens, reported by category."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from drafthead import provenance
from drafthead.config import load_recipe
from drafthead.core.vocabulary import coverage
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.responses import Response, part_path, write_part
from drafthead.exporting.head import export_head
from drafthead.models.target import load_target_spec
from drafthead.models.tokenizer import special_tokens
from drafthead.training.setup import Survey, draft_vocabulary, open_inputs, survey
from tests.training import launching

BY_COVERAGE = ("head.draft_vocab_size=0", "head.coverage=0.9")


@pytest.mark.parametrize("overrides", [("head.coverage=0.98",), ("head.draft_vocab_size=0",)])
def test_exactly_one_way_to_choose_a_size(overrides):
    with pytest.raises(ValueError, match=r"head\.draft_vocab_size \d+ and head\.coverage .*: set exactly one"):
        load_recipe(overrides=overrides)


@pytest.mark.parametrize("share", ["0", "1.01", "-1"])
def test_a_coverage_is_a_share(share):
    with pytest.raises(ValueError, match=r"head\.coverage"):
        load_recipe(overrides=["head.draft_vocab_size=0", f"head.coverage={share}"])


def test_only_a_size_chosen_by_coverage_follows_the_vocabulary():
    assert load_recipe(overrides=BY_COVERAGE).head.sized(320).draft_vocab_size == 320
    assert load_recipe().head.sized(320).draft_vocab_size == 2048  # a mismatch is for the export to refuse


def test_the_templates_control_tokens_are_found_and_reserved_ones_are_not():
    from transformers import AutoTokenizer

    recipe = load_recipe()
    special, emitted = special_tokens(recipe)
    names = set(AutoTokenizer.from_pretrained(recipe.target_path).convert_ids_to_tokens(sorted(emitted)))
    # <|return|> and <|call|> end a generation; the others stand in the template
    assert names == {"<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"}
    assert emitted < special


def test_tokens_that_the_template_writes_by_variable_count(tmp_path):
    target = tmp_path / "target"
    shutil.copytree(load_recipe().target_path, target)
    (target / "generation_config.json").unlink()
    (target / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    from transformers import AutoTokenizer

    _, emitted = special_tokens(load_recipe(overrides=[f"target.path={target}"]))
    names = set(AutoTokenizer.from_pretrained(target).convert_ids_to_tokens(sorted(emitted)))
    assert names == {"<|startoftext|>", "<|return|>"}


def test_size_follows_coverage_and_control_tokens_are_in(fresh_recipe):
    recipe = fresh_recipe(*BY_COVERAGE)
    inputs = open_inputs(recipe)
    categories = {name: "even" if i % 2 == 0 else "odd" for i, name in enumerate(inputs.train.ids[:-1])}
    found = survey(inputs.train, inputs.spec.vocab_size, 96, 3, categories)
    vocabulary = draft_vocabulary(recipe, found)
    assert coverage(found.generated, vocabulary) >= 0.9
    assert len(vocabulary.d2t) % 64 == 0
    _, emitted = special_tokens(recipe)
    assert vocabulary.t2d[torch.tensor(sorted(emitted))].all()
    assert set(found.by_category) == {"even", "odd"}
    last = inputs.train.tokens(len(inputs.train) - 1)  # its category is not known
    missing = torch.bincount(last[0][last[1]], minlength=inputs.spec.vocab_size)
    assert torch.equal(sum(found.by_category.values()) + missing, found.generated)


def test_special_tokens_past_the_rows_of_lm_head_are_left_out(fresh_recipe):
    """As the image token of a multimodal tokenizer: the head has no row to copy for it."""
    recipe = fresh_recipe("head.draft_vocab_size=4")
    ids = torch.tensor(sorted(special_tokens(recipe)[1]))
    few = int(ids.median())  # as if the target's vocabulary ended among the special tokens
    counts = torch.ones(few, dtype=torch.long)
    vocabulary = draft_vocabulary(recipe, Survey(counts, torch.zeros_like(counts), [], 0, {}))
    assert vocabulary.t2d[ids[ids < few]].all()
    assert len(vocabulary.t2d) == few


@pytest.mark.slow
def test_a_run_by_coverage_trains_reports_and_exports(fresh_recipe):
    recipe = fresh_recipe(*BY_COVERAGE)
    (recipe.directory() / "data").unlink()
    shutil.copytree(fresh_recipe(name="source").directory() / "data", recipe.directory() / "data")
    with_categories(recipe)
    said = launching.run(recipe, *BY_COVERAGE)
    size = int(said.split("draft vocabulary ")[1].split(" of ")[0])
    assert size % 64 == 0
    assert size < 256
    assert "\n  chat                 " in said
    assert "\n  code                 " in said
    head = export_head(recipe, serve_check=False)  # the texts are made up: nothing to serve
    tensors, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == tensors["lm_head.weight"].shape[0] == size
    assert load_target_spec(recipe.target_path).vocab_size == len(tensors["t2d"])


def with_categories(recipe) -> None:
    """Responses that say which category each training sequence belongs to."""
    directory, names = recipe.responses_dir("train"), open_inputs(recipe).train.ids
    provenance.begin(directory, RESPONSES, {})
    kinds = [Response(n, ("chat", "code")[i % 2], [], [], [], "", "stop", 0, "low", 0) for i, n in enumerate(names)]
    write_part(part_path(directory, 0), kinds)
    provenance.finish(directory, {})
