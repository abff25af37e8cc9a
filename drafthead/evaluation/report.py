"""The report: one HTML file that opens anywhere, the plots as PNGs, and the same in Markdown.

Everything is computed from the Parquet rows on disk, so a report can be made again without measuring. Images
are embedded and no script or style is loaded from elsewhere; what this gives up is interactive plots.
"""

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from drafthead.config import Recipe
from drafthead.evaluation import acceptance, serving
from drafthead.evaluation.cost import cost_per_million
from drafthead.evaluation.figures import Picture, acceptance_pictures, serving_pictures
from drafthead.evaluation.request_metrics import FORMULAS
from drafthead.evaluation.summary import THROUGHPUT, AcceptanceSummary, Level, summarise_acceptance, summarise_serving
from drafthead.evaluation.tables import (
    Cell,
    Table,
    acceptance_table,
    load_table,
    lossless_table,
    position_table,
    print_acceptance,
    print_serving,
    serving_table,
)
from drafthead.evaluation.verdict import (
    DEPLOY,
    DO_NOT,
    Verdict,
    headline,
    judge,
    serve_command,
    speculative_flag,
)
from drafthead.provenance import atomic_path, require

_TONES = {DEPLOY: "better", DO_NOT: "worse"}


@dataclass(frozen=True)
class Section:
    """A heading with its tables and plots."""

    title: str
    tables: list[Table]
    pictures: list[Picture]


@dataclass(frozen=True)
class Report:
    """Everything a reader sees, before it is rendered."""

    name: str
    headline: str
    verdicts: list[Verdict]
    caveats: list[str]
    facts: list[tuple[str, str]]
    sections: list[Section]
    flag: str
    command: str


def write_report(recipe: Recipe) -> Path:
    """Write report.html, report.md and the PNGs into the results folder; returns the HTML's path.

    Raises:
        ArtefactError: acceptance or serving was not measured, or not to the end.
    """
    directory = recipe.results_dir
    folders = {acceptance.KIND: acceptance.acceptance_dir(recipe), serving.KIND: directory / serving.KIND}
    manifests = {kind: require(path, kind, f"python eval/{kind}.py RECIPE") for kind, path in folders.items()}
    summary = summarise_acceptance(acceptance.read_acceptance(folders[acceptance.KIND]))
    runs = serving.read_runs(directory / serving.KIND)
    levels = summarise_serving(serving.read_requests(directory / serving.KIND), runs)
    report = build_report(recipe, summary, levels, manifests)
    for picture in (p for section in report.sections for p in section.pictures):
        with atomic_path(directory / f"{picture.name}.png") as temporary:
            temporary.write_bytes(picture.light)
    for name in ("report.html", "report.md"):
        with atomic_path(directory / name) as temporary:
            temporary.write_text(render(report, f"{name}.jinja"), encoding="utf-8")
    return directory / "report.html"


def print_report(recipe: Recipe) -> None:
    """The same tables and the verdict on the terminal."""
    directory = recipe.results_dir
    print_acceptance(summarise_acceptance(acceptance.read_acceptance(acceptance.acceptance_dir(recipe))))
    folder = directory / serving.KIND
    levels = summarise_serving(serving.read_requests(folder), serving.read_runs(folder))
    print_serving(levels)
    for verdict in map(judge, levels):
        print(f"concurrency {verdict.concurrency}: {verdict.decision} - {verdict.reason}")
    print(f"\nServe it with:\n  {serve_command(recipe)}\n\nReport: {directory / 'report.html'}")


def build_report(
    recipe: Recipe, summary: AcceptanceSummary, levels: Sequence[Level], manifests: dict[str, dict[str, Any]]
) -> Report:
    """Everything the templates need."""
    verdicts = [judge(level) for level in levels]
    served = [serving_table(levels), load_table(levels)]
    if (price := recipe.eval.price_per_gpu_hour) is not None:
        served.append(_cost_table(price, recipe.engine.tensor_parallel_size, levels))
    return Report(
        name=recipe.name,
        headline=headline(verdicts),
        verdicts=verdicts,
        caveats=_caveats(recipe, manifests),
        facts=_facts(recipe, manifests),
        sections=[
            Section(
                "Acceptance",
                [acceptance_table(summary), position_table(summary), lossless_table(summary)],
                acceptance_pictures(summary),
            ),
            Section("Serving", served, serving_pictures(levels)),
        ],
        flag=speculative_flag(recipe),
        command=serve_command(recipe),
    )


def render(report: Report, template: str) -> str:
    """Fill one of the templates beside this module."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("drafthead.evaluation", "templates"),
        autoescape=template.startswith("report.html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    return environment.get_template(template).render(report=report, formulas=FORMULAS, tones=_TONES)


def _facts(recipe: Recipe, manifests: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    offline, served = manifests[acceptance.KIND], manifests[serving.KIND]
    identity, made_by = offline["identity"], served["made_by"]
    commands = ["python eval/" + shlex.join(m["made_by"]["command"]) for m in (offline, served)]
    return [
        ("Target", f"{identity['target']} ({identity['dtype']}, fingerprint {identity['target_fingerprint'][:12]})"),
        ("Head", f"{recipe.head_dir} (reference {identity.get('head', 'none')[:12]})"),
        ("Draft tokens K", str(identity["num_draft_tokens"])),
        ("Temperature", "0 (greedy)"),
        ("Answers", f"at most {identity['max_tokens']} tokens, reasoning effort {identity['reasoning_effort']}"),
        (
            "Prompts",
            f"{offline['counts']['prompts']} held out, {offline['counts']['too_long']} too long for the engine",
        ),
        ("Machine", f"{made_by['machine']}, {served['counts']['device']}"),
        ("Versions", ", ".join(f"{k} {v}" for k, v in made_by["versions"].items())),
        ("Commit", str(made_by["git_commit"])),
        ("Measured", f"{made_by['created']}, {served['counts']['servers']} servers"),
        ("Commands", "; ".join(dict.fromkeys(commands))),
    ]


def _caveats(recipe: Recipe, manifests: dict[str, dict[str, Any]]) -> list[str]:
    caveats = []
    if manifests[serving.KIND]["counts"]["device"] == "CPU":
        caveats.append(
            "Measured on a CPU. Drafting pays where a target step is limited by memory and costs far more than a "
            "draft step; with a small model on a CPU neither holds, so speed here says nothing about a GPU."
        )
    if recipe.eval.repeats == 1:
        caveats.append(
            "One server start per arm: the intervals cover prompts, not what differs between starts. "
            "Set eval.repeats=2 for an ABBA design."
        )
    return caveats


def _cost_table(price: float, gpus: int, levels: Sequence[Level]) -> Table:
    rows = []
    for level in levels:
        costs = [cost_per_million(price, gpus, v) for v in level.values[THROUGHPUT.key]]
        rows.append([Cell(str(level.concurrency)), *(Cell(f"{cost:.3f}") for cost in costs)])
    note = f"{price} per GPU and hour × {gpus} GPUs, in the currency of the price; all costs on output tokens."
    return Table("Cost per 1M output tokens", ["Concurrency", "Baseline", "EAGLE-3"], rows, note)
