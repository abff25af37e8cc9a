"""The rows that measurements write, as Parquet; columns.yaml beside this says what every column means."""

from importlib import resources
from pathlib import Path

import pandas as pd
import yaml

from drafthead.artifacts import ArtifactError
from drafthead.files import atomic_path

_MEANING = yaml.safe_load((resources.files("drafthead.evaluation") / "columns.yaml").read_text(encoding="utf-8"))

ACCEPTANCE_COLUMNS: dict[str, str] = _MEANING["acceptance"]
FORMULAS: dict[str, str] = _MEANING["times"]
REQUEST_COLUMNS: dict[str, str] = _MEANING["level"] | _MEANING["requests"] | FORMULAS
RUN_COLUMNS: dict[str, str] = _MEANING["level"] | _MEANING["runs"]


def write_rows(rows: pd.DataFrame, path: Path) -> None:
    """Write a file whole or not at all."""
    with atomic_path(path) as temporary:
        rows.to_parquet(temporary)


def read_rows(directory: Path, *patterns: str) -> pd.DataFrame:
    """The rows of all files that match, by pattern and then by name.

    Raises:
        ArtifactError: an earlier version wrote them.
    """
    paths = [path for pattern in patterns for path in sorted(directory.glob(pattern))]
    found = [pd.read_parquet(path) for path in paths]
    if not found or "method" not in found[0]:
        raise ArtifactError(
            f"{directory} is of an earlier version, which said `arm` for `method`: delete it, measure again"
        )
    return pd.concat(found, ignore_index=True)
