"""Artifacts are complete or visibly unfinished, and never mixed."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import save_file

from drafthead import artifacts
from drafthead.artifacts import ArtifactError
from drafthead.files import DiskFullError, atomic_path, delete_folder, remove_leftovers, write_json
from tests.damage import half_written


def test_an_artifact_from_claim_to_manifest(tmp_path):
    directory = tmp_path / "states"
    assert not artifacts.begin(directory, "states", {"aux layers": (2, 4)})
    (directory / "shard").write_bytes(b"rows")
    with pytest.raises(ArtifactError, match="states .*run: harvest"):
        artifacts.require(directory, "states", "harvest")
    artifacts.finish(directory, {"shards": 1})
    with pytest.raises(ArtifactError, match="states of schema 1.* prompts"):
        artifacts.require(directory, "prompts", "make it")
    manifest = artifacts.require(directory, "states", "harvest")
    assert manifest["counts"] == {"shards": 1}
    assert artifacts.finish(directory, {}, lasting=False)["files"] == {}  # made to be consumed
    (directory / "shard").write_bytes(b"rowx")
    assert artifacts.reference(artifacts.finish(directory, {"shards": 1})) != artifacts.reference(manifest)
    assert manifest["files"]["shard"]["bytes"] == 4
    assert artifacts.begin(directory, "states", {"aux layers": (2, 4)})


def test_many_may_claim_the_same_at_once(tmp_path):
    def claim(number: int) -> bool:
        directory = tmp_path / f"states-{number // 8}"
        finished = artifacts.begin(directory, "states", {"aux layers": [2]})
        (directory / f"shard-{number}").write_bytes(b"rows")
        return finished

    with ThreadPoolExecutor(16) as pool:
        assert not any(pool.map(claim, range(800)))
    assert not [*tmp_path.rglob(".*")]


def test_another_identity_is_refused_with_both_values(tmp_path):
    artifacts.begin(tmp_path / "a", "states", {"target": {"id": "x"}, "aux layers": [2]})
    with pytest.raises(ArtifactError, match=r"target.id: found 'x', wanted 'y'") as error:
        artifacts.begin(tmp_path / "a", "states", {"target": {"id": "y"}, "aux layers": [2]})
    assert "aux layers" not in str(error.value)


@pytest.mark.parametrize("name", ["notes.txt", "identity.json"])
def test_foreign_and_damaged_files_are_refused_and_kept(name, tmp_path):
    (tmp_path / name).write_text("{mine")
    with pytest.raises(ArtifactError, match=name):
        artifacts.begin(tmp_path, "states", {})
    assert (tmp_path / name).read_text() == "{mine"


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert artifacts.read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]


def test_a_writer_removes_what_a_killed_one_left_aside_and_nothing_else(tmp_path):
    half_written(tmp_path / "shard-1")
    (tmp_path / ".shard-1.0a1b2c3d.whole.tmp").write_text("whole")  # killed before the last renaming
    leftovers = half_written(tmp_path / "shard-10")
    (tmp_path / ".shard-1.lock").write_text("held")
    with atomic_path(tmp_path / "shard-1") as temporary:
        temporary.write_text("whole")
    assert set(tmp_path.iterdir()) == {leftovers, tmp_path / ".shard-1.lock", tmp_path / "shard-1"}


@pytest.mark.parametrize("write", [lambda path: path.write_text("same"), lambda path: save_file({}, path)])
def test_of_two_writers_the_later_one_does_not_stop_the_first(tmp_path, write):
    path = tmp_path / "part"
    with atomic_path(path) as first:
        with atomic_path(path) as second:
            assert first.parent.exists()
            write(second)
        write(first)
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(FileNotFoundError), atomic_path(path):  # an error of its own
        (tmp_path / "other").read_text()
    with atomic_path(path) as late:  # begun after the first one's renaming, before its removal of temporary files
        remove_leftovers(path)
        write(late)
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises((FileNotFoundError, SafetensorError)), atomic_path(tmp_path / "other") as lost:  # noqa: PT012
        remove_leftovers(tmp_path / "other")
        write(lost)
    (long := tmp_path / ("x" * 250)).write_text("before")  # whose temporary name is too long
    with pytest.raises(OSError, match="too long"), atomic_path(long):
        pass


def test_a_full_disk_gets_back_what_killed_writers_took(tmp_path):
    for before in ([], ["part"]):
        half_written(tmp_path / "part")
        with pytest.raises(DiskFullError), atomic_path(tmp_path / "part"):
            raise OSError(errno.ENOSPC, "No space left on device")
        assert [path.name for path in tmp_path.iterdir()] == before
        (tmp_path / "part").write_text("whole")


def test_what_lies_below_a_hidden_folder_is_no_part_of_an_artifact(tmp_path):
    artifacts.begin(tmp_path, "run", {})
    for name in ("step_1", ".step_2.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "weights").write_text("rows")
    assert [*artifacts.finish(tmp_path, {})["files"]] == ["checkpoints/step_1/weights"]


def test_a_folder_that_cannot_be_listed_gives_no_manifest_without_its_files(tmp_path, monkeypatch):
    artifacts.begin(tmp_path / "made", "thing", {})
    write_json(tmp_path / "made" / "part.json", 1)

    def fails(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fails)
        with pytest.raises(OSError, match="made"):
            artifacts.finish(tmp_path / "made", {})
    assert [*artifacts.finish(tmp_path / "made", {})["files"]] == ["part.json"]


def test_a_deletion_that_fails_names_the_whole_path(tmp_path, monkeypatch):
    write_json(tmp_path / "old" / "part.json", 1)

    def fails(path, **_options):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "unlink", fails)
    with pytest.raises(OSError, match="old/part.json"):
        delete_folder(tmp_path / "old")


def test_nothing_stays_beside_a_file_that_has_its_name(tmp_path, monkeypatch):
    """Nobody writes that file again, so nobody would come to clean up."""
    path, replace, before = tmp_path / "part", os.replace, []

    def seen(source, target):
        if Path(target) == path:
            before.extend(tmp_path.iterdir())
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen)
    with atomic_path(path) as temporary:
        temporary.write_text("rows")
        (temporary.parent / ".tmpXYZ").write_text("of the library that wrote it")
    (whole,) = before
    assert whole.name.endswith(".whole.tmp"), "the file itself, about to be renamed, and no folder beside it"
    assert [p.name for p in tmp_path.iterdir()] == ["part"]
