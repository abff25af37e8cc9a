"""The report of a published experiment, repeated: the post's tables and curves with intervals, and its own numbers."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from drafthead.artifacts import read_manifest
from drafthead.config import Recipe
from drafthead.evaluation.measuring.plan import Plan, PlannedSweep
from drafthead.evaluation.measuring.presets import Preset
from drafthead.evaluation.reporting.published import published_table
from drafthead.evaluation.reporting.report import Report, Section, write_pages
from drafthead.evaluation.reporting.serving_figures import sweep_pictures
from drafthead.evaluation.reporting.serving_tables import (
    acceptance_under_load,
    cost_table,
    draft_length_table,
    limits_table,
    matrix_tables,
    means_tables,
    memory_table,
    plan_table,
    wide_table,
)
from drafthead.evaluation.reporting.tables import Table
from drafthead.evaluation.results.levels import MEASURE, Level, summarise_serving
from drafthead.evaluation.results.serving_rows import ServingRows, read_serving
from drafthead.files import atomic_path

# What advice needs, whatever the post shows.
_ALWAYS = ("output_tokens_per_s",)


def write_preset_report(recipe: Recipe, preset: Preset, plan: Plan, measured: Path, directory: Path) -> Path:
    """Write report.html, report.md, the PNGs and runs.parquet, all runs in one file; returns the HTML's path.

    Args:
        recipe: of the measurement.
        preset: the experiment.
        plan: of it, with its tables.
        measured: the serving artifact.
        directory: where to.
    """
    rows = read_serving(measured)
    page = write_pages(build_preset_report(recipe, preset, plan, rows, read_manifest(measured)), directory)
    with atomic_path(directory / "runs.parquet") as temporary:
        rows.runs.to_parquet(temporary, index=False)
    return page


def build_preset_report(recipe: Recipe, preset: Preset, plan: Plan, rows: ServingRows, manifest: dict) -> Report:
    """Every table of the post in a section of its own, then what stands over all of them."""
    sections, every = [], []
    for index, sweep in enumerate(plan.sweeps):
        own = _rows_of(sweep, rows)
        levels = summarise_serving(own, [MEASURE[key] for key in dict.fromkeys((*_ALWAYS, *sweep.measures))])
        every += levels
        tables = _sweep_tables(recipe, sweep, levels, own.runs)
        sections.append(Section(sweep.title, list(tables), sweep_pictures(levels, f"table-{index + 1}")))
    beside = limits_table(every, preset.tpot_limits_ms, recipe.eval.price_per_gpu_hour)
    whole = [beside, memory_table(rows.runs), published_table(every, recipe.target.path), plan_table(plan, preset)]
    sections.append(Section("Over all of it", [one for one in whole if one], []))
    made_by, counts = manifest["made_by"], manifest["counts"]
    return Report(
        title=preset.title,
        question=preset.note,
        headline=f"repeated with {recipe.name}",
        facts=[
            ("Target", recipe.target.path),
            ("Head", str(recipe.head_dir)),
            ("Machine", f"{made_by['machine']}, {counts['device']}"),
            ("Versions", ", ".join(f"{k} {v}" for k, v in made_by["versions"].items())),
            ("Measured", f"{made_by['created']}, {counts['servers']} servers, commit {made_by['git_commit']}"),
        ],
        sections=sections,
        caveats=[f"Left out: {reason}." for reason in plan.skipped],
    )


def _sweep_tables(recipe: Recipe, sweep: PlannedSweep, levels: list[Level], runs: pd.DataFrame) -> Iterator[Table]:
    yield wide_table(sweep.title, levels)
    yield from means_tables(levels, only_reached=False)
    if (lengths := draft_length_table(levels)) is not None:
        yield lengths
    if (acceptance := acceptance_under_load(runs)) is not None:
        yield acceptance
    if len({level.load for level in levels}) > 1:
        yield from matrix_tables(levels)
    if recipe.eval.price_per_gpu_hour is not None:
        yield cost_table(levels, recipe.eval.price_per_gpu_hour)


def _rows_of(sweep: PlannedSweep, rows: ServingRows) -> ServingRows:
    """The rows of a sweep's servers at its levels."""
    levels = {(level.workload.name, level.load.name, level.temperature) for level in sweep.levels}

    def own(frame: pd.DataFrame) -> pd.DataFrame:
        series = zip(frame["arm"], frame["k"], strict=True)
        keys = zip(frame["prompts_of"], frame["load"], frame["temperature"], strict=True)
        return frame[[one in sweep.series and key in levels for one, key in zip(series, keys, strict=True)]]

    return ServingRows(own(rows.requests), own(rows.runs))
