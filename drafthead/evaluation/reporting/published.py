"""Published figures (docs/published.yaml) beside a user's own, where target, workload, K and statistic are the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from drafthead.config import REPO_ROOT
from drafthead.evaluation.reporting.serving_tables import series_name
from drafthead.evaluation.reporting.tables import Cell, Table, table
from drafthead.evaluation.results.levels import MEASURE, Level, geometric_means
from drafthead.evaluation.workload import HEAD

FIGURES = REPO_ROOT / "docs" / "published.yaml"
_LOWER_IS_BETTER = ("ttft", "tpot", "itl", "e2e_p", "cost")
_UNITS = {"s": 1.0, "ms": 1e3}


@cache
def published() -> dict[str, Any]:
    """Everything that the posts print, as text."""
    return dict(yaml.safe_load(FIGURES.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Figure:
    """One measure of one comparison, as printed.

    Attributes:
        post, target, workload, gpus, K: of what.
        method: the post's name of the head; empty where it stands for the recipe's.
        statistic: geomean over the post's levels, or the name of a load.
        measure: with its unit as the last part.
        baseline, head: the figures.
        percent: printed beside them, or empty.
    """

    post: str
    target: str
    workload: str
    gpus: int
    K: int
    method: str
    statistic: str
    measure: str
    baseline: str
    head: str
    percent: str = ""

    @property
    def name(self) -> str:
        """For a list of figures."""
        return f"{self.workload}, {self.gpus} GPU(s), K = {self.K}, {self.statistic}, {self.measure}"

    @property
    def lower_is_better(self) -> bool:
        return self.measure.startswith(_LOWER_IS_BETTER)

    @property
    def change(self) -> float:
        """Relative change by this project's convention: positive = better; for times baseline / head - 1."""
        ratio = float(self.head) / float(self.baseline)
        return (1 / ratio if self.lower_is_better else ratio) - 1

    @property
    def key(self) -> str:
        """Of our measure."""
        stem, _, unit = self.measure.rpartition("_")
        return (
            "e2e_p50" if self.measure == "e2e_speedup" else stem if unit in _UNITS and stem in MEASURE else self.measure
        )


def figures() -> Iterator[Figure]:
    """Every figure that has a baseline, those of matrices relative to 100."""
    data = published()
    for entry in data["comparisons"]:
        shared = {key: entry[key] for key in ("post", "workload", "gpus", "K", "statistic")}
        shared |= {"target": data["posts"][entry["post"]]["target"], "method": entry.get("method", "")}
        for measure, texts in entry["measures"].items():
            yield Figure(**shared, measure=measure, **dict(zip(("baseline", "head", "percent"), texts, strict=False)))
    for matrix in data["matrices"]:
        shared = {"post": matrix["post"], "target": data["posts"][matrix["post"]]["target"], "method": ""}
        shared |= {"gpus": matrix["gpus"], "K": matrix["K"]}
        for measure, loads in matrix["measures"].items():
            for load, texts in loads.items():
                for workload, text in zip(matrix["workloads"], texts, strict=True):
                    yield Figure(
                        **shared, workload=workload, statistic=load, measure=measure, baseline="100", head=text
                    )


def published_lengths() -> dict[int, list[float]]:
    """K -> acceptance lengths of public heads on real text, the bonus token included."""
    found: dict[int, list[float]] = {}
    for entry in published()["acceptance"]:
        if "meaningless" not in entry and entry["post"] in ("redhat", "public heads"):
            found.setdefault(entry["K"], []).append(float(entry["length"]))
    return found


def published_table(levels: Sequence[Level], target: str) -> Table | None:
    """What posts print of the same target, workload, GPUs, K and statistic; None where there is nothing.

    Args:
        levels: measured.
        target: the recipe's, by name.
    """
    rows = []
    for figure in figures():
        same = [
            level
            for level in levels
            if (target, level.prompts_of, level.gpus or 1, level.K, level.method)
            == (figure.target, figure.workload, figure.gpus, figure.K, figure.method or HEAD)
        ]
        ours = _ours(figure, same)
        if ours is None:
            continue
        rows.append(
            {
                "Post": figure.post,
                "Figure": figure.name,
                "Baseline there": Cell(figure.baseline),
                "With drafts there": Cell(figure.head),
                "Change there (%)": Cell(f"{100 * figure.change:+.1f}", "better" if figure.change > 0 else "worse"),
                "Change here (%)": Cell(f"{100 * ours:+.1f}"),
                "Here": series_name(same[0].method, same[0].K),
            }
        )
    note = (
        "By one sign convention: positive = better, for times baseline / head − 1. Another machine, another vLLM, and "
        "a head of another training. What is wrong in the posts themselves: python tools/check_published.py."
    )
    return table("Published figures", rows, note) if rows else None


def _ours(figure: Figure, same: Sequence[Level]) -> float | None:
    if figure.statistic == "geomean":
        means = {mean.measure.key: mean.change for mean in (geometric_means(same, only_reached=False) if same else [])}
        return means.get(figure.key)
    at = [level for level in same if level.load == figure.statistic and figure.key in level.changes]
    return at[0].changes[figure.key].interval.value if at else None
