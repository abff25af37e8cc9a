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
    pytest.mark.skipif(not _can_mount(), reason="needs a user namespace in which a tmpfs can be mounted"),
]


def full_and_then_not(folder: Path, size: str, stage: list[str]) -> list[str]:
    """Run a stage on a file system of `size`, again with room, and keep its files; what each said and ended with."""
    run = f"{shlex.join(stage)} 2>&1; echo ended with $?"
    script = f"""
        set -u
        mount -t tmpfs -o size={size} none {folder}/disk
        {run}; find {folder}/disk -name '*.tmp' -o -name step_*; echo ====
        mount -o remount,size=200m {folder}/disk
        {run}; cp -a {folder}/disk {folder}/kept
    """
    (folder / "disk").mkdir()
    result = subprocess.run(
        [*_TMPFS, script], cwd=REPO_ROOT, capture_output=True, text=True, check=False, timeout=1200, env=environment()
    )
    assert result.stdout.count("====") == 1, result.stdout + result.stderr
    return result.stdout.split("====")


def test_training_stops_on_a_full_disk_and_resumes_with_room(tmp_path):
    recipe = small_recipe(tmp_path)
    synthetic_stores(recipe, 60, 6)
    (tmp_path / "fs").mkdir()
    output = tmp_path / "fs" / "disk"
    stage = [sys.executable, SCRIPT, f"output_dir={output}", *SMALL]
    link = ["ln", "-sfn", str(Path(recipe.output_dir) / "data"), f"{output}/data"]
    both = ["sh", "-c", f"{shlex.join(link)} && {shlex.join(stage)}"]
    full, roomy = full_and_then_not(tmp_path / "fs", "9m", both)
    assert "DiskFullError" in full
    assert "Traceback" not in full
    assert "step_00000008.tmp" not in full
    assert "resuming from step 4" in roomy
    assert "best checkpoint" in roomy
    assert checkpoints(tmp_path / "fs" / "kept" / "runs" / "tiny")
