"""Outputs that lie on another disk, behind links: written and read as if they were here, and never deleted there."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from drafthead import artifacts
from drafthead.artifacts import ArtifactError
from drafthead.data.store import KIND
from drafthead.exporting import export as exporting
from drafthead.exporting.export import export_head
from drafthead.training import checkpoint
from drafthead.training.inputs import open_inputs
from tests.exporting.runs import random_weights, recipe_at, shape_of, write_run
from tests.training.synthetic import small_recipe, synthetic_stores


@pytest.fixture
def disk(tmp_path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def link(path: Path, folder: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_states_runs_and_heads_behind_links_are_made_and_read(tmp_path, disk):
    recipe = recipe_at(tmp_path / "out")
    places = {"states": recipe.states_dir("train"), "run": recipe.run_dir, "head": recipe.head_dir}
    for name, path in places.items():
        (disk / name).mkdir()
        link(path, disk / name)
    trained = small_recipe(tmp_path / "out")
    synthetic_stores(trained, 4, 4)
    assert len(open_inputs(trained).train) == 4
    write_run(recipe)
    export_head(recipe, serve_check=False)
    assert all(path.is_symlink() for path in places.values())
    assert names(disk / "states") == ["identity.json", "manifest.json", "shard-00000.safetensors"]
    assert "model.safetensors" in names(disk / "head")


@pytest.mark.parametrize("linked", [False, True])
def test_an_export_that_fails_leaves_nothing_to_serve_and_leaves_the_link(tmp_path, disk, monkeypatch, linked):
    monkeypatch.setattr(exporting, "check_serving", Mock(side_effect=ValueError("the engine disagrees")))
    for name in ("engine", r"fc\.weight"):
        recipe = recipe_at(tmp_path / name)
        weights = random_weights(shape_of(recipe))
        wrong = {} if name == "engine" else {"fc.weight": weights["fc.weight"][:, :-1].contiguous()}
        write_run(recipe, weights | wrong)
        if linked:
            link(recipe.head_dir, disk)
        with pytest.raises(ValueError, match=name):
            export_head(recipe)
        assert recipe.head_dir.is_symlink() == recipe.head_dir.exists() == linked
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize("linked", ["train", "states", "data"])
def test_a_link_to_a_disk_that_is_not_mounted_is_named(tmp_path, linked):
    recipe = small_recipe(tmp_path)
    directory = recipe.states_dir("train")
    at = next(path for path in (directory, *directory.parents) if path.name == linked)
    link(at, tmp_path / "scratch")
    for reading in (lambda: artifacts.begin(directory, KIND, {}), lambda: artifacts.require(directory, KIND, "make")):
        with pytest.raises(ArtifactError, match=rf"{at} .*{tmp_path / 'scratch'}"):
            reading()


def test_files_of_a_folder_that_was_moved_away_stay_in_the_manifest(tmp_path, disk):
    artifacts.begin(tmp_path / "run", "run", {})
    link(tmp_path / "run" / "checkpoints", disk)
    (disk / "weights").write_text("rows")
    assert list(artifacts.finish(tmp_path / "run", {})["files"]) == ["checkpoints/weights"]
    (disk / "weights").write_text("rowx")
    assert artifacts.verify_files(tmp_path / "run") == ["checkpoints/weights"]


def test_retention_deletes_a_link_and_not_what_it_leads_to(tmp_path, disk):
    (disk / "weights").write_text("rows")
    link(checkpoint.checkpoint_dir(tmp_path, 4), disk)
    for step in (8, 12):
        checkpoint.checkpoint_dir(tmp_path, step).mkdir()
    checkpoint.retain(tmp_path, 1, checkpoint.TrainState(12, 1, 1, 1.5, 12, 1.5))
    assert names(tmp_path / "checkpoints") == ["step_00000012"]
    assert (disk / "weights").read_text() == "rows"
