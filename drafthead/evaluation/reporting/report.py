"""The report: one HTML file that opens anywhere, the plots as PNGs, and the same in Markdown.

Everything is computed from rows on disk, or from the one file that holds them all, so a report can be made again
without measuring. Images
are embedded and no script or style is loaded from elsewhere; what this gives up is interactive plots.
"""

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from drafthead.config import Recipe
from drafthead.evaluation.decision.analysis import Analysis
from drafthead.evaluation.decision.cost import payback_text
from drafthead.evaluation.decision.deployment import Advice, advise
from drafthead.evaluation.decision.verdict import DEPLOY, DO_NOT, UP_TO, Verdict
from drafthead.evaluation.measuring import acceptance, serving
from drafthead.evaluation.measuring.request_metrics import FORMULAS
from drafthead.evaluation.reporting.decision_tables import cost_model_tables, matrix_tables, model_text, published_table
from drafthead.evaluation.reporting.figures import Picture, acceptance_pictures
from drafthead.evaluation.reporting.serving_figures import decision_pictures, serving_pictures
from drafthead.evaluation.reporting.serving_tables import (
    length_cell,
    level_name,
    memory_table,
    print_serving,
    series_name,
    serving_tables,
)
from drafthead.evaluation.reporting.tables import (
    Cell,
    Table,
    acceptance_tables,
    change_cell,
    interval_text,
    print_acceptance,
    print_table,
)
from drafthead.evaluation.results.levels import THROUGHPUT, Level
from drafthead.evaluation.results.one_file import NAME, Results, write_one_file
from drafthead.evaluation.results.summary import AcceptanceSummary
from drafthead.evaluation.workload import NAMES
from drafthead.files import atomic_path, in_markdown

_TONES = {DEPLOY: "better", UP_TO: "better", DO_NOT: "worse"}


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
    advice: Advice


def write_report(results: Results, analysis: Analysis, directory: Path) -> Path:
    """Write report.html, report.md, the PNGs and results.parquet; returns the HTML's path.

    Args:
        results: what was measured.
        analysis: of it.
        directory: where to.
    """
    report = build_report(results.recipe, analysis)
    for picture in (p for section in report.sections for p in section.pictures):
        with atomic_path(directory / f"{picture.name}.png") as temporary:
            temporary.write_bytes(picture.light)
    for name in ("report.html", "report.md"):
        with atomic_path(directory / name) as temporary:
            temporary.write_text(render(report, f"{name}.jinja"), encoding="utf-8")
    write_one_file(directory / NAME, results)
    return directory / "report.html"


def print_report(recipe: Recipe, analysis: Analysis) -> None:
    """The same tables on the terminal, and the verdict after them."""
    print_acceptance(analysis.acceptance)
    print_serving(analysis.levels)
    for table in cost_model_tables(analysis.priced, analysis.levels):
        print_table(table)
    for verdict in analysis.verdicts:
        print(f"\n{verdict_text(verdict)}")
        for level in verdict.levels:
            print(f"  concurrency {level.concurrency}: {level.decision} - {level.reason}")
    print_advice(recipe, analysis)


def build_report(recipe: Recipe, analysis: Analysis) -> Report:
    """Everything the templates need."""
    return Report(
        name=recipe.name,
        headline=" · ".join(dict.fromkeys(v.headline for v in analysis.verdicts if v.method == analysis.main.method)),
        verdicts=analysis.verdicts,
        caveats=_caveats(recipe, analysis),
        facts=_facts(recipe, analysis),
        sections=_sections(recipe, analysis),
        advice=advise(recipe, analysis),
    )


def _sections(recipe: Recipe, analysis: Analysis) -> list[Section]:
    summary, levels = analysis.acceptance, analysis.levels
    served = serving_tables(levels, recipe.eval.price_per_gpu_hour, recipe.engine.tensor_parallel_size)
    memory, beside = memory_table(analysis.rows.runs), published_table(levels)
    decided = cost_model_tables(analysis.priced, analysis.levels)
    sections = [
        Section("Acceptance", acceptance_tables(summary), acceptance_pictures(summary)),
        Section("Serving", [*served, *([memory] if memory else [])], serving_pictures(levels)),
        Section("Every load and draft length", [*matrix_tables(levels), *decided], decision_pictures(analysis)),
    ]
    return [*sections, Section("Beside published figures", [beside], [])] if beside else sections


def render(report: Report, template: str) -> str:
    """Fill one of the templates beside this module."""
    page = template.startswith("report.html")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("drafthead.evaluation.reporting", "templates"),
        autoescape=page,
        finalize=None if page else _in_markdown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    return environment.get_template(template).render(report=report, formulas=FORMULAS, tones=_TONES)


def _in_markdown(value: Any) -> Any:
    """Names of sources and models are somebody else's words; what the template calls safe stays as it is."""
    return value if isinstance(value, Markup) else in_markdown(value)


def _facts(recipe: Recipe, analysis: Analysis) -> list[tuple[str, str]]:
    manifests: dict[str, dict[str, Any]] = analysis.manifests
    offline, served = manifests[acceptance.KIND], manifests[serving.KIND]
    identity, made_by = offline["identity"], served["made_by"]
    commands = ["python eval/" + shlex.join(m["made_by"]["command"]) for m in (offline, served)]
    return [
        ("Target", f"{identity['target']} ({identity['dtype']}, fingerprint {identity['target_fingerprint'][:12]})"),
        ("Head", f"{recipe.head_dir} (reference {identity.get('head', 'none')[:12]})"),
        ("Draft tokens K", str(identity["num_draft_tokens"])),
        ("Temperature", f"{analysis.acceptance.temperature:g}" + " (greedy)" * (not analysis.acceptance.temperature)),
        ("Responses", f"at most {identity['max_tokens']} tokens, reasoning effort {identity['reasoning_effort']}"),
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


def _caveats(recipe: Recipe, analysis: Analysis) -> list[str]:
    caveats = []
    if analysis.manifests[serving.KIND]["counts"]["device"] == "CPU":
        caveats.append(
            "Measured on a CPU. Drafting pays where a target step is limited by memory and costs far more than a "
            "draft step; with a small model on a CPU neither holds, so speed here says nothing about a GPU."
        )
    if recipe.eval.repeats == 1:
        caveats.append(
            "One server start per method: the intervals cover prompts, not what differs between starts. Set "
            "eval.repeats=3 for blocks in alternating order, whose spread is then part of every interval."
        )
    if recipe.eval.traffic.concurrency is None:
        caveats.append(
            "No traffic is given, so every measured load counts alike: set eval.traffic.concurrency.C=SHARE for each."
        )
    caveats += [f"Cost model, {workload} prompts. {model_text(priced)}" for workload, priced in analysis.priced.items()]
    if text := payback_text(recipe, analysis.main_levels, analysis.main.change.resolved, analysis.main.up_to):
        caveats.append(text)
    return caveats


# What a decider needs, on one screen: the verdict, one table, what to start. Everything else is in the report.


def print_brief(recipe: Recipe, analysis: Analysis) -> None:
    """The verdict on the terminal, with the one table it rests on."""
    print_table(brief_table(analysis.verdicts, analysis.levels))
    print(f"\n{acceptance_line(analysis.acceptance)}")
    for verdict in analysis.verdicts:
        print(f"\n{verdict_text(verdict)}")
    print_advice(recipe, analysis, brief=True)


def print_advice(recipe: Recipe, analysis: Analysis, brief: bool = False) -> None:
    """What to start, `brief` by its flag where there is one, and when the head has paid for itself."""
    advice = advise(recipe, analysis)
    print(f"\n{advice.text}\n  {(brief and advice.flag) or advice.command}")
    if text := payback_text(recipe, analysis.main_levels, analysis.main.change.resolved, analysis.main.up_to):
        print(f"\n{text}")


def verdict_text(verdict: Verdict) -> str:
    """A verdict in two lines."""
    return f"{verdict.workload} prompts, {verdict.method} at K = {verdict.K}: {verdict.headline}\n  {verdict.reason}"


def brief_table(verdicts: Sequence[Verdict], levels: Sequence[Level]) -> Table:
    """Every judged load of the draft lengths that the verdicts are about."""
    rows = []
    for verdict in verdicts:
        decisions = {level.concurrency: level.decision for level in verdict.levels}
        for level in levels:
            if level.steady and (level.workload, level.method, level.K) == (
                verdict.workload,
                verdict.method,
                verdict.K,
            ):
                decision = decisions.get(level.concurrency, "not in the traffic")
                rows.append([Cell(level_name(level, levels)), *_cells(level), Cell(decision)])
    columns = [
        "Concurrency",
        "Method",
        "Output tok/s",
        "Change (%)",
        "Median latency (%)",
        "Acceptance length",
        "Verdict",
    ]
    note = "Positive = better everywhere; brackets: 95 % paired bootstrap over prompts; grey: unresolved."
    return Table("Serving with the head, against no speculation", columns, rows, note, text_columns=2)


def _cells(level: Level) -> list[Cell]:
    baseline, method = level.values[THROUGHPUT.key]
    changes = [change_cell(level.changes[key], level.reached) for key in (THROUGHPUT.key, "e2e_p50")]
    return [
        Cell(series_name(level.method, level.K)),
        Cell(f"{baseline:.1f} → {method:.1f}"),
        *changes,
        length_cell(level),
    ]


def acceptance_line(summary: AcceptanceSummary) -> str:
    """Acceptance length of every method over all prompts, and how often the text stayed the same."""
    pooled = [m for m in summary.methods if m.category == "all"]
    lengths = ", ".join(f"{NAMES[m.method]} {interval_text(m.length)} (K = {m.K})" for m in pooled)
    same = ", ".join(f"{NAMES[method]} {100 * share.value:.0f} %" for method, share in summary.identical.items())
    text = f"Acceptance length at T = {summary.temperature:g}: {lengths}."
    return f"{text} Responses identical to the baseline's: {same}." if same else text
