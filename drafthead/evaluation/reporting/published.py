"""Published figures (docs/published.yaml) beside a user's own, where target, workload, K and statistic are the same."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

import numpy as np
import yaml

from drafthead.config import REPO_ROOT
from drafthead.config.evaluation import HEAD
from drafthead.evaluation.columns import LevelKey
from drafthead.evaluation.reporting.tables import Cell, Table, note, table
from drafthead.evaluation.results.levels import MEASURE, LoadComparison, geometric_means
from drafthead.evaluation.workload import MethodNames
from drafthead.statistics import Change, TimeChange

FIGURES = REPO_ROOT / "docs" / "published.yaml"


@cache
def published() -> dict[str, Any]:
    """Everything that the posts print, as text."""
    return dict(yaml.safe_load(FIGURES.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Figure:
    """One measure of one comparison, as printed.

    Attributes:
        baseline, head: the figures.
        percent: printed beside them, or empty.
        post, target, workload, gpus, K: of what.
        method: the post's name of the head; empty where it stands for the recipe's.
        temperature: of the responses.
        statistic: geomean over the post's levels, or the name of a load.
        measure: with its unit as the last part.
    """

    workload: str
    baseline: str
    head: str
    percent: str = ""
    _: KW_ONLY
    post: str
    target: str
    gpus: int
    K: int
    method: str
    temperature: float
    statistic: str
    measure: str

    @property
    def name(self) -> str:
        """For a list of figures."""
        return f"{self.workload}, {self.gpus} GPU(s), K = {self.K}, {self.statistic}, {self.measure}"

    @property
    def lower_is_better(self) -> bool:
        return self.measure.startswith(("ttf", "tpot", "itl", "e2e_p", "cost"))

    @property
    def change(self) -> Change:
        """Relative change by this project's convention: positive = better; for times baseline / head - 1; no bounds."""
        ratio = float(self.head) / float(self.baseline)
        kind = TimeChange if self.lower_is_better and not self.measure.startswith("cost") else Change
        return kind((1 / ratio if self.lower_is_better else ratio) - 1, np.nan, np.nan)

    @property
    def key(self) -> str:
        """Of our measure."""
        if self.measure == "e2e_speedup":
            return "e2e_p50"
        stem = self.measure.removesuffix("_ms").removesuffix("_s")
        return stem if stem in MEASURE else self.measure


def figures() -> Iterator[Figure]:
    """Every figure that has a baseline, those of matrices relative to 100."""
    data = published()
    for entry in (*data["comparisons"], *data["matrices"]):
        post = data["posts"][entry["post"]]
        of = {"target": post["target"], "temperature": post.get("temperature", 0), "method": entry.get("method", "")}
        of |= {key: entry[key] for key in ("post", "gpus", "K")}
        for measure, found in entry["measures"].items():
            if "statistic" in entry:
                yield Figure(entry["workload"], *found, measure=measure, statistic=entry["statistic"], **of)
                continue
            for load, texts in found.items():
                for workload, text in zip(entry["workloads"], texts, strict=True):
                    yield Figure(workload, "100", text, measure=measure, statistic=load, **of)


def published_table(levels: Sequence[LoadComparison], names: MethodNames, target: str) -> Table | None:
    """What posts print of the same target, workload, GPUs, K and statistic; None where there is nothing.

    A geometric mean is one over the post's loads, all of them.

    Args:
        levels: measured.
        names: of the methods.
        target: the recipe's, by name.
    """
    rows = []
    for figure in (figure for figure in figures() if figure.target == target):
        key = LevelKey(figure.workload, figure.temperature, figure.gpus, figure.method or HEAD, figure.K, None)
        same = [level for level in levels if level.key.over_loads == key]
        if figure.statistic == "geomean":
            loads = published()["posts"][figure.post]["concurrency"]
            of_post = [x for x in same if x.key.steady and x.key.concurrency in loads]
            means = geometric_means(of_post, only_reached=False) if len(of_post) == len(loads) else []
            ours = [mean.change for mean in means if mean.measure.key == figure.key]
        else:
            at = [level.changes for level in same if level.key.load and level.key.load.name == figure.statistic]
            ours = [changes[figure.key] for changes in at if figure.key in changes]
        if ours:
            rows.append({
                "Post": figure.post,
                "Figure": figure.name,
                "Baseline there": Cell(figure.baseline),
                "With drafts there": Cell(figure.head),
                "Change there": Cell(figure.change.amount(), "better" if figure.change.value > 0 else "worse"),
                "Change here": Cell(ours[0].amount()),
                "Here": names.at(same[0].key.method, same[0].key.K),
            })  # fmt: skip
    return table("Published figures", rows, note("published")) if rows else None
