"""Planted defects between the head that was trained and the one that is served are named."""

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from drafthead.artifacts import MANIFEST, read_json
from drafthead.drafters.trained import best_checkpoint, read_checkpoint
from drafthead.exporting.check import head_differences
from drafthead.exporting.export import export_head
from drafthead.files import write_json
from drafthead.target.spec import load_target_spec
from tests.damage import edit_config, replace_tensors
from tests.exporting.runs import random_weights, recipe_at, shape_of, write_run


@pytest.fixture(scope="module", params=["eagle3", "peagle", "dflash", "dspark"])
def exported(request, tmp_path_factory):
    """A head of the type with its run, whose norms are not ones."""
    more = () if request.param == "eagle3" else (f"head.type={request.param}", "head.mask_token_id=9")
    recipe = recipe_at(tmp_path_factory.mktemp(request.param), *more)
    write_run(recipe, random_weights(shape_of(recipe)))
    return recipe, export_head(recipe, serve_check=False)


def _differences(recipe, directory) -> str:
    source = read_checkpoint(best_checkpoint(recipe.run_dir))
    shape = source.shape(load_target_spec(recipe.target_path))
    return "\n".join(head_differences(recipe, directory, source, shape))


def _other_layers(directory):
    """Whichever key of whichever drafter holds them."""
    config = read_json(directory / "config.json")
    for outer in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in [key for key in outer if "layer_ids" in key]:
            outer[key] = [layer - 1 for layer in outer[key]]
    write_json(directory / "config.json", config)


def _other_vocabulary(directory):
    t2d = load_file(directory / "model.safetensors")["t2d"].roll(-1)
    d2t = t2d.nonzero()[:, 0] - torch.arange(int(t2d.sum()))
    replace_tensors(directory / "model.safetensors", {"t2d": t2d, "d2t": d2t})


def _other_target(directory):
    manifest = read_json(directory / MANIFEST)
    manifest["identity"]["target"] |= {"path": "org/another", "fingerprint": "0" * 64}
    write_json(directory / MANIFEST, manifest)


PLANTED = {
    "layer_ids": _other_layers,
    "norm.weight": lambda directory: replace_tensors(directory / "model.safetensors", {"norm.weight": None}),
    "another draft vocabulary": _other_vocabulary,
    "rope": partial(edit_config, rope_parameters={"rope_type": "default", "rope_theta": 123.0}),
    "another target: the head was made for org/another": _other_target,
}


def test_a_head_as_it_was_trained_has_no_difference(exported):
    assert _differences(*exported) == ""


@pytest.mark.parametrize("named", PLANTED)
def test_a_planted_defect_is_named(exported, tmp_path, named):
    recipe, directory = exported
    planted = shutil.copytree(directory, tmp_path / "head")
    PLANTED[named](planted)
    assert named in _differences(recipe, planted)
