"""What a stage leaves behind, in a form in which two runs of the same work are equal, and what is left out of it.

A payload maps each file that has its name to a digest of its content. Content is the file's bytes, except where a
file also says when and how fast it was made: those fields are named here, and nowhere else.
"""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pandas as pd

from drafthead import artifacts
from drafthead.files import sha256_file

# Counts of a manifest, and columns or fields of a file, that say how long the work took or where it ran.
TIMES = {
    "manifest.json": {"train_seconds"},
    "metrics.jsonl": {"tokens_per_second", "memory_gib", "eta_seconds", "step_seconds"},
    "requests-*.parquet": {"start_s", "gaps_s", "ttfot_s", "ttft_s", "e2e_s", "tpot_s", "itl_s", "tpot_all_s"},
    "runs-*.parquet": {
        "achieved", "running", "waiting", "prefix_hits", "reached", "duration_s", "output_tokens_per_s",
        "server_start_s", "server_command", "finished_at",
    },
}  # fmt: skip
# Not compared: logs of servers, and DeepSpeed's own resume state, a pickle. That the latter is right shows
# in the losses and weights of the steps that follow it.
LEFT_OUT = ("*/logs/*", "*/deepspeed/*")
# Appended to line by line and cut back to the checkpoint by a resumed run, or replaced as training goes on: what they
# end with is only there when the run is whole. Of servers that failed there is a note until they have passed.
GROWING = ("metrics.jsonl", "progress.json", "failed.json")


def visible_files(folder: Path, deep: bool) -> list[Path]:
    """Files that have their names: neither hidden nor below a hidden folder."""
    found = folder.rglob("*") if deep else folder.glob("*")
    return sorted(
        path
        for path in found
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file()
    )


def leftovers(folder: Path) -> list[Path]:
    """What a killed process left aside: half-written files, notes, locks."""
    return [path for path in folder.rglob(".*") if path.name.startswith(".")]


def content(path: Path) -> str:
    """A digest of what a file says, its times left out.

    Raises:
        Exception: a file with its name cannot be read to its end; that is what the harness looks for.
    """
    times = next((fields for pattern, fields in TIMES.items() if fnmatch(path.name, pattern)), set())
    if path.name == artifacts.MANIFEST:
        return artifacts.digest(_manifest(json.loads(path.read_text()), times))
    if path.suffix == ".jsonl":
        entries = map(json.loads, path.read_text().splitlines())
        return artifacts.digest([{k: v for k, v in entry.items() if k not in times} for entry in entries])
    if times:
        return artifacts.digest(pd.read_parquet(path).drop(columns=sorted(times)).to_json(orient="records"))
    return sha256_file(path)


def _manifest(manifest: dict[str, Any], times: set[str]) -> dict[str, Any]:
    # Files are compared themselves, so their digests may go; `made_by` has the command and the time.
    counts = {key: value for key, value in manifest.get("counts", {}).items() if key not in times}
    return {"identity": manifest.get("identity"), "counts": counts, "files": sorted(_listed(manifest["files"]))}


def _listed(names: Any) -> list[str]:
    return [name for name in names if not any(fnmatch(f"/{name}", pattern) for pattern in LEFT_OUT)]
