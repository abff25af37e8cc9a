"""The columns of every Parquet file that a measurement writes; columns.yaml beside this says what they mean."""

from importlib import resources

import yaml

_MEANING = yaml.safe_load((resources.files("drafthead.evaluation") / "columns.yaml").read_text(encoding="utf-8"))

ACCEPTANCE_COLUMNS: dict[str, str] = _MEANING["acceptance"]
FORMULAS: dict[str, str] = _MEANING["times"]
REQUEST_COLUMNS: dict[str, str] = _MEANING["level"] | _MEANING["requests"] | FORMULAS
RUN_COLUMNS: dict[str, str] = _MEANING["level"] | _MEANING["runs"]
