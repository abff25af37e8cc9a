"""The rows that measurements write, as Parquet; columns.yaml beside this says what every column means."""

from importlib import resources
from pathlib import Path

import pandas as pd
import yaml

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


def read_rows(directory: Path, *patterns: str) -> pd.DataFrame:
    """The rows of all files that match, by pattern and then by name."""
    paths = [path for pattern in patterns for path in sorted(directory.glob(pattern))]
    return pd.concat(map(pd.read_parquet, paths), ignore_index=True)
