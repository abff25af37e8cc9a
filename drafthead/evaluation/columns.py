"""The rows that measurements write, as Parquet; columns.yaml beside this says what every column means."""

from importlib import resources
from pathlib import Path

import pandas as pd
import yaml

from drafthead.artifacts import ArtifactError
from drafthead.files import atomic_path

_MEANING = yaml.safe_load((resources.files("drafthead.evaluation") / "columns.yaml").read_text(encoding="utf-8"))

ACCEPTANCE_COLUMNS: dict[str, str] = _MEANING["acceptance"]
FORMULAS: dict[str, str] = _MEANING["times"] | _MEANING["derived"]
REQUEST_COLUMNS: dict[str, str] = _MEANING["level"] | _MEANING["requests"] | _MEANING["times"]
RUN_COLUMNS: dict[str, str] = _MEANING["level"] | _MEANING["runs"]


def write_rows(rows: pd.DataFrame, path: Path) -> None:
    """Write a file whole or not at all."""
    with atomic_path(path) as temporary:
        rows.to_parquet(temporary)


def read_rows(directory: Path, columns: dict[str, str], *patterns: str) -> pd.DataFrame:
    """The rows of all files that match, by pattern and then by name.

    Raises:
        ArtifactError: one of the columns is missing, as in rows of an earlier version.
    """
    paths = [path for pattern in patterns for path in sorted(directory.glob(pattern))]
    found = [pd.read_parquet(path) for path in paths] or [pd.DataFrame()]
    # A measurement of an earlier version may have been continued by this one.
    if missing := columns.keys() - set.intersection(*(set(rows.columns) for rows in found)):
        raise ArtifactError(
            f"{directory} has no {', '.join(sorted(missing))}: an earlier version measured it. Move it away and "
            f"measure again: python eval/{'acceptance' if columns is ACCEPTANCE_COLUMNS else 'serving'}.py RECIPE"
        )
    return pd.concat(found, ignore_index=True)
