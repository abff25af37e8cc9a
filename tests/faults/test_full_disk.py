"""A file system that is really full: stages stop with one message, keep what they had, and go on when there is room."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from drafthead.config import REPO_ROOT
from tests.scripts import environment
from tests.training.launching import SCRIPT, checkpoints
from tests.training.synthetic import SMALL, small_recipe, synthetic_stores

_TMPFS = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")  # a mount that only the command sees


def _can_mount() -> bool:
    try:
        return subprocess.run([*_TMPFS, "mount -t tmpfs none /mnt"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not _can_mount(), reason="needs a user namespace in which a tmpfs can be mounted"),
]


def test_training_stops_on_a_full_disk_and_resumes_with_room(tmp_path):
    recipe, disk = small_recipe(tmp_path), tmp_path / "disk"
    synthetic_stores(recipe, 60, 6)
    disk.mkdir()
    stage = f"{shlex.join([sys.executable, SCRIPT, f'output_dir={disk}', *SMALL])} 2>&1"
    script = f"""
        set -u
        mount -t tmpfs -o size=9m none {disk}
        ln -s {Path(recipe.output_dir) / "data"} {disk}/data
        {stage}; find {disk} -name '*.tmp' -o -name step_*; echo ====
        mount -o remount,size=200m {disk}
        {stage}; cp -a {disk} {tmp_path}/kept
    """
    result = subprocess.run(
        [*_TMPFS, script], cwd=REPO_ROOT, capture_output=True, text=True, check=False, timeout=1200, env=environment()
    )
    assert result.stdout.count("====") == 1, result.stdout + result.stderr
    full, roomy = result.stdout.split("====")
    assert "DiskFullError" in full
    assert "Traceback" not in full
    assert "step_00000008.tmp" not in full
    assert "resuming from step 4" in roomy
    assert "best checkpoint" in roomy
    assert checkpoints(tmp_path / "kept" / "runs" / "tiny")
