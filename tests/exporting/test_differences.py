"""Planted defects between the head that was trained and the one that is served are named."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafthead.artifacts import MANIFEST, read_json
from drafthead.drafters.trained import best_checkpoint, read_checkpoint
from drafthead.exporting.check import head_differences
from drafthead.exporting.export import export_head
from drafthead.files import write_json
from drafthead.target.pieces import load_target_spec
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


def _config(change):
    def plant(directory):
        config = read_json(directory / "config.json")
        change(config)
        write_json(directory / "config.json", config)

    return plant


def _tensors(change):
    def plant(directory):
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return plant


def _other_layers(config):
    """Whichever key of whichever drafter holds them."""
    for outer in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in [key for key in outer if "layer_ids" in key]:
            outer[key] = [layer - 1 for layer in outer[key]]


def _other_vocabulary(tensors):
    t2d = tensors["t2d"].roll(-1)
    tensors["t2d"], tensors["d2t"] = t2d, t2d.nonzero()[:, 0] - torch.arange(len(tensors["d2t"]))


def _other_target(directory):
    manifest = read_json(directory / MANIFEST)
    manifest["identity"]["target"] |= {"path": "org/another", "fingerprint": "0" * 64}
    write_json(directory / MANIFEST, manifest)


PLANTED = {
    "layer_ids": _config(_other_layers),
    "norm.weight": _tensors(lambda tensors: tensors.pop("norm.weight")),
    "another draft vocabulary": _tensors(_other_vocabulary),
    "rope": _config(lambda config: config["rope_parameters"].update(rope_theta=123.0)),
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
