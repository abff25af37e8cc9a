"""The checksum that travels with a shard until a manifest holds it."""

import subprocess

import pytest

from drafthead.data import checksums
from drafthead.data.store import shard_path, write_shard
from drafthead.provenance import ArtefactError, begin, finish, verify_files
from tests.damage import flip_bit, half_written
from tests.data.sequences import sequence


@pytest.fixture
def shard(tmp_path):
    path = shard_path(tmp_path, 3)
    begin(tmp_path, "states", {})
    write_shard(path, [sequence("a", 9)], num_target_layers=5)
    return path


def test_a_changed_byte_is_told_from_the_note(shard):
    checksums.check(shard)
    note = shard.with_name(".shard-00003.sha256").name
    subprocess.run(["sha256sum", "--check", "--quiet", note], cwd=shard.parent, check=True)
    flip_bit(shard)
    with pytest.raises(ArtefactError, match=r"shard-00003.safetensors has SHA-256 .* its bytes were changed; delete"):
        checksums.check(shard)
    checksums.forget(shard)
    checksums.check(shard)  # of an earlier version: nothing to compare with


def test_a_manifest_takes_the_writers_checksum(shard):
    noted = checksums.noted(shard)
    flip_bit(shard)  # after the writing and before the manifest: reading again would have certified it
    manifest = finish(shard.parent, {}, checksums={shard.name: noted})
    assert list(manifest["files"]) == [shard.name]
    assert verify_files(shard.parent) == [shard.name]


def test_what_a_killed_writer_left_goes_with_the_next_and_other_shards_are_left_alone(shard):
    own, note, other = (
        half_written(shard.with_name(name))
        for name in ("shard-00003.safetensors", ".shard-00003.sha256", "shard-00004.safetensors")
    )
    write_shard(shard, [sequence("a", 9)], num_target_layers=5)
    assert not own.exists()
    assert not note.exists()
    assert other.exists()
