"""The serving check on a trained head: it passes what was trained and stops what was not."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafthead.artifacts import require
from drafthead.data.responses import part_path, write_part
from drafthead.exporting.card import write_card
from drafthead.exporting.check import check_serving
from drafthead.exporting.export import open_checkpoint
from drafthead.target.spec import load_target_spec
from tests.artifacts import read_responses, write_prompt_artifact

pytestmark = pytest.mark.slow


def test_the_card_says_what_the_head_was_made_from(tiny_run):
    text = (tiny_run.head_dir / "README.md").read_text()
    run = require(tiny_run.run_dir, "run", "")
    made = require(tiny_run.responses_dir("train"), "responses", "")["counts"]
    fingerprint = run["identity"]["target"]["fingerprint"][:16]
    for part in (
        tiny_run.target.path, fingerprint, f"{made['responses']} ", "temperature 0.7", "tiny, chat: 40",
        "tiny, long: 40", "the last 25 % of prompts", "| 3 | 0 |", "device hours (1 rank(s))", "## Limits",
        "## Licence", "objective forward_kl at temperature 0.7,",
    ):  # fmt: skip
        assert part in text, f"{part!r} is not in\n{text}"
    share = run["counts"]["best_step"] / run["counts"]["total_steps"]
    assert f"{round(tiny_run.train.epochs * share * made['response_tokens']):,} " in text


def test_the_card_does_not_describe_prompts_that_were_drawn_anew(tiny_run, tmp_path):
    left_out = shutil.ignore_patterns("states", "results")
    root = shutil.copytree(tiny_run.output_dir, tmp_path / "copy", ignore=left_out)
    recipe = tiny_run.model_copy(update={"output_dir": str(root)})
    assert "tiny, chat: 40" in write_card(recipe).read_text()
    directory = recipe.responses_dir("train")
    answered = read_responses(directory)
    answered.remove(next(response for response in answered if response.category == "chat"))
    for part in directory.glob("part-*"):
        part.unlink()
    write_part(part_path(directory, 0), answered)
    assert "tiny, chat: 39" in write_card(recipe).read_text()  # what had no response taught nothing
    shutil.rmtree(recipe.prompts_dir)
    write_prompt_artifact(recipe)
    assert "- Data: not known" in write_card(recipe).read_text()


def test_a_head_with_permuted_layers_is_stopped(tiny_run, tmp_path):
    """Nothing about names, shapes or config.json is wrong with it."""
    spec = load_target_spec(tiny_run.target_path)
    source = open_checkpoint(tiny_run, None, spec)
    directory = tmp_path / "head"
    shutil.copytree(tiny_run.head_dir, directory)
    tensors = load_file(directory / "model.safetensors")
    first, second, third = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([third, first, second], dim=1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="does not serve the head that was trained.* predicts"):
        check_serving(tiny_run, directory, source, source.shape(spec))
