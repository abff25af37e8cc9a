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
from drafthead.evaluation.reporting.acceptance_tables import acceptance_tables
from drafthead.evaluation.reporting.decision_tables import cost_model_tables, model_text
from drafthead.evaluation.reporting.figures import Picture, acceptance_pictures
from drafthead.evaluation.reporting.published import published_table
from drafthead.evaluation.reporting.serving_figures import decision_pictures, serving_pictures
from drafthead.evaluation.reporting.serving_tables import (
    acceptance_under_load,
    length_cell,
    level_name,
    matrix_tables,
    memory_table,
    series_name,
    serving_tables,
)
from drafthead.evaluation.reporting.tables import (
    Cell,
    Table,
    Tone,
    change_cell,
    interval_text,
    print_table,
    print_tables,
    table,
)
from drafthead.evaluation.results.levels import THROUGHPUT, Level
from drafthead.evaluation.results.one_file import NAME, Results, write_one_file
from drafthead.evaluation.results.summary import AcceptanceSummary
from drafthead.evaluation.workload import NAMES
from drafthead.files import atomic_path, in_markdown

_TONES: dict[str, Tone] = {DEPLOY: "better", UP_TO: "better", DO_NOT: "worse"}


@dataclass(frozen=True)
class Section:
    """A heading with its tables and plots."""

    title: str
    tables: list[Table]
    pictures: list[Picture]


@dataclass(frozen=True)
class Report:
    """Everything a reader sees, before it is rendered; a published experiment has no verdict and advises nothing."""

    title: str
    question: str
    headline: str
    facts: list[tuple[str, str]]
    sections: list[Section]
    caveats: list[str]
    verdicts: Sequence[Verdict] = ()
    advice: Advice | None = None


def write_report(results: Results, analysis: Analysis, directory: Path) -> Path:
    """Write report.html, report.md, the PNGs and results.parquet; returns the HTML's path.

    Args:
        results: what was measured.
        analysis: of it.
        directory: where to.
    """
    page = write_pages(build_report(results.recipe, analysis), directory)
    write_one_file(directory / NAME, results)
    return page


def write_pages(report: Report, directory: Path) -> Path:
    """Write report.html, report.md and the PNGs; returns the HTML's path."""
    for picture in (p for section in report.sections for p in section.pictures):
        with atomic_path(directory / f"{picture.name}.png") as temporary:
            temporary.write_bytes(picture.light)
    for name in ("report.html", "report.md"):
        with atomic_path(directory / name) as temporary:
            temporary.write_text(render(report, f"{name}.jinja"), encoding="utf-8")
    return directory / "report.html"


def print_report(recipe: Recipe, analysis: Analysis) -> None:
    """The same tables on the terminal, and the verdict after them."""
    for section in _sections(recipe, analysis):
        print_tables(section.tables)
    for verdict in analysis.verdicts:
        print(f"\n{verdict_text(verdict)}")
        for level in verdict.levels:
            print(f"  concurrency {level.concurrency}: {level.decision} - {level.reason}")
    print_advice(recipe, analysis)


def build_report(recipe: Recipe, analysis: Analysis) -> Report:
    """Everything the templates need."""
    return Report(
        title=f"Draft head “{recipe.name}”",
        question="Does this head make serving faster, and where?",
        headline=analysis.main.headline,
        facts=_facts(recipe, analysis),
        sections=_sections(recipe, analysis),
        caveats=_caveats(recipe, analysis),
        verdicts=analysis.verdicts,
        advice=advise(recipe, analysis),
    )


def _sections(recipe: Recipe, analysis: Analysis) -> list[Section]:
    summary, levels, runs = analysis.acceptance, analysis.levels, analysis.rows.runs
    workloads = [workloads_table(analysis.verdicts, levels), *matrix_tables(levels)]
    served = serving_tables(levels, recipe.eval.price_per_gpu_hour, recipe.engine.tensor_parallel_size)
    counted, memory = acceptance_under_load(runs), memory_table(runs)
    beside = published_table(levels, recipe.target.path)
    pictures = decision_pictures(analysis)
    sections = [
        Section("Workloads", workloads, []) if len({level.workload for level in levels}) > 1 else None,
        Section("Acceptance", acceptance_tables(summary), acceptance_pictures(summary)),
        Section("Serving", [*served, *filter(None, (counted, memory))], serving_pictures(levels)),
        Section("Every load and draft length", cost_model_tables(analysis.priced, levels), pictures),
        Section("Beside published figures", [beside], []) if beside else None,
    ]
    return [section for section in sections if section]


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


def tracked(analysis: Analysis) -> dict[str, float | str]:
    """The figures of an evaluation for a tracker: verdicts, acceptance lengths, and every level's change."""
    found: dict[str, float | str] = {}
    for m in analysis.acceptance.methods:
        found[f"evaluation/acceptance_length/{m.category}/{m.method}-k{m.K}"] = m.length.value
    for verdict in analysis.verdicts:
        found[f"evaluation/verdict/{verdict.workload}/{verdict.method}-k{verdict.K}"] = verdict.headline
    for level in analysis.levels:
        name = f"evaluation/change/{level.workload}/{level.load}/{level.method}-k{level.K}"
        found |= {f"{name}/{key}": change.interval.value for key, change in level.changes.items()}
    return found


# What a decider needs, on one screen: the verdict, one table, what to start. Everything else is in the report.


def print_brief(recipe: Recipe, analysis: Analysis) -> None:
    """The verdict on the terminal, with the one table it rests on."""
    print_table(brief_table(analysis.verdicts, analysis.levels))
    print(f"\n{acceptance_line(analysis.acceptance)}")
    for verdict in analysis.verdicts:
        if verdict.workload == analysis.main.workload:
            print(f"\n{verdict_text(verdict)}")
        else:
            print(f"{verdict.workload} prompts, {verdict.method} at K = {verdict.K}: {verdict.headline}")
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
        for level in _levels_of(verdict, levels):
            baseline, method = level.values[THROUGHPUT.key]
            rows.append(
                {
                    "Concurrency": level_name(level, levels),
                    "Method": series_name(level.method, level.K),
                    "Output tok/s": Cell(f"{baseline:.1f} → {method:.1f}"),
                    "Change (%)": change_cell(level.changes[THROUGHPUT.key], level.reached),
                    "Median latency (%)": change_cell(level.changes["e2e_p50"], level.reached),
                    "Acceptance length": length_cell(level),
                    "Verdict": Cell(decisions.get(level.concurrency, "not in the traffic")),
                }
            )
    note = "Positive = better everywhere; brackets: 95 % paired bootstrap over prompts; grey: unresolved."
    return table("Serving with the head, against no speculation", rows, note)


def workloads_table(verdicts: Sequence[Verdict], levels: Sequence[Level]) -> Table:
    """Verdict, acceptance length and throughput of every workload side by side."""
    rows = [
        {
            "Workload": verdict.workload,
            "Method": series_name(verdict.method, verdict.K),
            "Verdict": Cell(verdict.headline, _TONES.get(verdict.decision, "unresolved")),
            "Over the traffic (%)": verdict.change,
        }
        | {f"c = {level.concurrency} (%)": level.changes[THROUGHPUT.key] for level in _levels_of(verdict, levels)}
        | {f"Length, c = {level.concurrency}": length_cell(level) for level in _levels_of(verdict, levels)}
        for verdict in verdicts
    ]
    note = (
        "Each workload alone on the server, and all of them together in `all`. Change of output throughput; acceptance "
        "length from the server's counters."
    )
    return table("Every workload", rows, note)


def _levels_of(verdict: Verdict, levels: Sequence[Level]) -> list[Level]:
    wanted = (verdict.workload, verdict.method, verdict.K)
    return [level for level in levels if level.steady and (level.workload, level.method, level.K) == wanted]


def acceptance_line(summary: AcceptanceSummary) -> str:
    """Acceptance length of every method over all prompts, and how often the text stayed the same."""
    pooled = [m for m in summary.methods if m.category == "all"]
    lengths = ", ".join(f"{NAMES[m.method]} {interval_text(m.length)} (K = {m.K})" for m in pooled)
    same = ", ".join(f"{NAMES[method]} {100 * share.value:.0f} %" for method, share in summary.identical.items())
    text = f"Acceptance length at T = {summary.temperature:g}: {lengths}."
    return f"{text} Responses identical to the baseline's: {same}." if same else text
