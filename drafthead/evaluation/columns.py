"""The rows that measurements write, as Parquet; columns.yaml beside this says what every column means."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from drafthead.config.evaluation import LoadConfig
from drafthead.files import atomic_path

_MEANING = yaml.safe_load((resources.files("drafthead.evaluation") / "columns.yaml").read_text(encoding="utf-8"))

ACCEPTANCE_COLUMNS: dict[str, str] = _MEANING["acceptance"]
FORMULAS: dict[str, str] = _MEANING["times"] | _MEANING["derived"]
REQUEST_COLUMNS: dict[str, str] = _MEANING["level"] | _MEANING["requests"] | _MEANING["times"]
RUN_COLUMNS: dict[str, str] = _MEANING["level"] | _MEANING["runs"]
SETTING = ["workload", "temperature", "tensor_parallel"]  # columns of LevelKey.setting


@dataclass(frozen=True)
class LevelKey:
    """Which measurement: what was sent under which load, and to which server.

    Attributes:
        workload: name of the prompts.
        temperature: of sampling; 0 is greedy.
        gpus: GPUs of the server.
        method: name of the method or endpoint.
        K: draft tokens per round; 0 for the baseline and for endpoints.
        load: requests in flight and their rate; None: several loads together.
    """

    workload: str
    temperature: float
    gpus: int
    method: str
    K: int
    load: LoadConfig | None

    @property
    def setting(self) -> tuple[str, float, int]:
        """What all methods are compared under, whatever the load."""
        return self.workload, self.temperature, self.gpus

    @property
    def concurrency(self) -> int:
        """The most requests in flight; 0: no cap."""
        return (self.load and self.load.concurrency) or 0

    @property
    def steady(self) -> bool:
        """Whether places were filled as they became free: what is decided is decided on such loads.

        At a request rate that is kept up with, throughput equals the offered load, so it cannot separate methods.
        """
        return self.load is not None and self.load.request_rate is None

    @property
    def load_name(self) -> str:
        """Requests in flight, or the whole load where a rate is part of it."""
        return self.load.name if self.load and self.load.request_rate else str(self.concurrency)

    @property
    def over_loads(self) -> "LevelKey":
        """The same over several loads."""
        return replace(self, load=None)

    @property
    def workload_title(self) -> str:
        """As tables name it, see `setting_title`."""
        return setting_title(*self.setting)

    def columns(self) -> dict[str, Any]:
        """The columns of a row that say which measurement it is of."""
        assert self.load is not None
        return dict(zip(SETTING, self.setting, strict=True)) | {
            "method": self.method, "k": self.K, "load": self.load.name, "concurrency": self.concurrency,
            "request_rate": float(self.load.request_rate or "inf"), "burstiness": self.load.burstiness,
        }  # fmt: skip


def level_key(row: pd.Series) -> LevelKey:
    """What a row of requests or of runs is of."""
    rate = None if np.isinf(row["request_rate"]) else float(row["request_rate"])
    load = LoadConfig(
        concurrency=int(row["concurrency"]) or None, request_rate=rate, burstiness=float(row["burstiness"])
    )
    workload, temperature, gpus = row[SETTING]
    return LevelKey(str(workload), float(temperature), int(gpus), str(row["method"]), int(row["k"]), load)


def setting_title(workload: str, temperature: float, gpus: int) -> str:
    """A workload with its temperature and GPUs where they are not 0 and 1."""
    return f"{workload}{f' T={temperature:g}' if temperature else ''}{f' TP{gpus}' if gpus > 1 else ''}"


def rows_of(frame: pd.DataFrame, keys: Iterable[LevelKey]) -> pd.DataFrame:
    """The rows of some measurements."""
    which = [*SETTING, "method", "k", "load"]
    wanted = [tuple(key.columns()[column] for column in which) for key in keys]
    return frame[frame.set_index(which).index.isin(wanted)]


def write_rows(rows: pd.DataFrame, path: Path) -> None:
    """Write a file whole or not at all."""
    with atomic_path(path) as temporary:
        rows.to_parquet(temporary)


def read_rows(directory: Path, *patterns: str) -> pd.DataFrame:
    """The rows of all files that match, by pattern and then by name."""
    paths = [path for pattern in patterns for path in sorted(directory.glob(pattern))]
    return pd.concat(map(pd.read_parquet, paths), ignore_index=True)
