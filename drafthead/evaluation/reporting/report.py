"""The report, of a recipe or of a published experiment: one HTML file that opens anywhere, Markdown, and PNGs.

Everything is computed from rows on disk, so a report can be made again without measuring, with other prices, traffic or
service levels. Images are embedded and no script or style is loaded from elsewhere; what this gives up is interactive
plots.
"""

import base64
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import jinja2
import pandas as pd
from markupsafe import Markup

from drafthead.artifacts import read_manifest
from drafthead.config import Recipe
from drafthead.config.evaluation import ALL
from drafthead.evaluation.columns import FORMULAS, rows_of, write_rows
from drafthead.evaluation.decision.analysis import Advice, Analysis, advise
from drafthead.evaluation.decision.verdict import DEPLOY, DO_NOT, UP_TO, Verdict
from drafthead.evaluation.measuring import acceptance, serving
from drafthead.evaluation.measuring.plan import ServePlan
from drafthead.evaluation.measuring.presets import Preset
from drafthead.evaluation.reporting import measured_tables as measured
from drafthead.evaluation.reporting.figures import Picture, acceptance_pictures, serving_pictures
from drafthead.evaluation.reporting.published import published_table
from drafthead.evaluation.reporting.tables import Cell, Table, Tone, change_cell, length_cell, note, print_table, table
from drafthead.evaluation.results.levels import THROUGHPUT, LoadComparison, ServingRows, read_serving, summarise_serving
from drafthead.evaluation.results.summary import AcceptanceSummary, summarise_places
from drafthead.evaluation.workload import BASELINE, MethodNames, method_names
from drafthead.files import atomic_path, in_markdown
from drafthead.statistics import TimeChange

_SHORT_CELL = 20  # characters
_TONES: dict[str, Tone] = {DEPLOY: "better", UP_TO: "better", DO_NOT: "worse"}


class Section(NamedTuple):
    """A heading with its tables and plots."""

    title: str
    tables: list[Table]
    pictures: Sequence[Picture]


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
    names: MethodNames | None = None  # of the verdicts' methods
    advice: Advice | None = None


def write_pages(report: Report, directory: Path) -> Path:
    """Write report.html, report.md and the PNGs; returns the HTML's path."""
    for picture in (p for section in report.sections for p in section.pictures):
        with atomic_path(directory / f"{picture.name}.png") as temporary:
            temporary.write_bytes(picture.png)
    for name in ("report.html", "report.md"):
        with atomic_path(directory / name) as temporary:
            temporary.write_text(render(report, f"{name}.jinja"), encoding="utf-8")
    return directory / "report.html"


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
    environment.filters["wrapping"] = _wrapping
    return environment.get_template(template).render(report=report, formulas=FORMULAS, tones=_TONES)


def _wrapping(text: str) -> str:
    """A short cell stays on one line, a longer one wraps: not within an amount or [low, high], nor at an equals."""
    inseparable = " " if len(text) <= _SHORT_CELL else r" (?=[^\[]*\]|=|%|times |longer|shorter)|(?<==) "
    return re.sub(inseparable, "\N{NO-BREAK SPACE}", text)


def _in_markdown(value: Any) -> Any:
    """Names of sources and models are somebody else's words; what the template calls safe stays as it is."""
    return value if isinstance(value, Markup) else in_markdown(value)


def _section(title: str, tables: Sequence[Table | None], pictures: Sequence[Picture] = ()) -> Section:
    """A table that is None is left out."""
    return Section(title, [one for one in tables if one], pictures)


def _served(
    title: str, levels: list[LoadComparison], requests: pd.DataFrame, recipe: Recipe, *, only_reached: bool = True
) -> list[Table | None]:
    names, price = method_names(recipe), recipe.eval.price_per_gpu_hour
    return [
        measured.levels_table(title, levels, names),
        measured.means_table(levels, names, only_reached=only_reached),
        measured.cost_table(levels, names, price) if price else None,
        measured.acceptance_under_load(requests, names),
    ]


# Of a recipe.


def build_report(recipe: Recipe, analysis: Analysis) -> Report:
    """Everything the templates need."""
    levels, runs, names = analysis.levels, analysis.rows.runs, method_names(recipe)
    matrices = measured.matrix_tables(levels, names)
    served = _served("Every load: same prompts as the baseline", levels, analysis.rows.requests, recipe)
    summary = analysis.acceptance
    sections = [
        _section("Workloads", [workloads_table(analysis, names), *matrices] if matrices else []),
        _section(
            "Acceptance",
            [measured.acceptance_table(summary, names), measured.places_table(summary.places, names)],
            acceptance_pictures(summary, names),
        ),
        _section("Serving", [*served, measured.memory_table(runs, names)], serving_pictures(levels, names)),
        _section("Beside published figures", [published_table(levels, names, recipe.target.path)]),
    ]
    return Report(
        title=f"Draft head “{recipe.name}”",
        question="Does this head make serving faster, and where?",
        headline=analysis.main.headline,
        facts=_facts(recipe, analysis),
        sections=[section for section in sections if section.tables],
        caveats=_caveats(recipe, analysis),
        verdicts=analysis.verdicts,
        names=names,
        advice=advise(recipe, analysis),
    )


def _facts(recipe: Recipe, analysis: Analysis) -> list[tuple[str, str]]:
    manifests: dict[str, dict[str, Any]] = analysis.manifests
    offline, served = manifests[acceptance.KIND], manifests[serving.KIND]
    identity, counts, temperature = offline["identity"], offline["counts"], analysis.acceptance.temperature
    effort = f"reasoning effort {identity['reasoning_effort']}"
    if template_kwargs := identity.get("chat_template_kwargs"):
        effort += f", chat_template_kwargs {json.dumps(template_kwargs)}"
    commands = ["python eval/" + shlex.join(m["made_by"]["command"]) for m in (offline, served)]
    return [
        ("Target", f"{identity['target']} ({identity['dtype']}, fingerprint {identity['target_fingerprint'][:12]})"),
        ("Head", f"{recipe.head_dir} (reference {identity.get('head', 'none')[:12]})"),
        ("Draft tokens K", str(identity["num_draft_tokens"])),
        ("Temperature", f"{temperature:g}" + " (greedy)" * (not temperature)),
        (
            "Responses",
            f"at most {identity['max_tokens']} tokens, {effort}",
        ),
        ("Prompts", f"{counts['prompts']} held out, {counts['too_long']} too long for the engine"),
        *_measured(served),
        ("Commands", "; ".join(dict.fromkeys(commands))),
    ]


def _measured(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Machine, versions and commit of a serving measurement."""
    made_by, counts = manifest["made_by"], manifest["counts"]
    return [
        ("Machine", f"{made_by['machine']}, {counts['device']}"),
        ("Versions", ", ".join(f"{k} {v}" for k, v in made_by["versions"].items())),
        ("Measured", f"{made_by['created']}, {counts['servers']} servers, commit {made_by['git_commit']}"),
    ]


def _caveats(recipe: Recipe, analysis: Analysis) -> list[str]:
    holds = {
        "on a CPU": analysis.manifests[serving.KIND]["counts"]["device"] == "CPU",
        "one start": analysis.rows.runs["block"].nunique() == 1,
        "no traffic": recipe.eval.traffic.concurrency is None,
    }
    return [*_not_measured(analysis.manifests[serving.KIND]), *(note(key) for key, true in holds.items() if true)]


def _not_measured(manifest: dict[str, Any]) -> list[str]:
    return [f"Not measured, as it failed whenever it was tried: {line}" for line in serving.left_out(manifest)]


def tracked(analysis: Analysis) -> dict[str, float | str]:
    """The figures of an evaluation for a tracker: verdicts, acceptance lengths, and every level's change.

    That of a time is how many times as long it is as the baseline's.
    """
    found: dict[str, float | str] = {}
    for m in analysis.acceptance.methods:
        found[f"evaluation/acceptance_length/{m.category}/{m.method}-k{m.K}"] = m.length.value
    for verdict in analysis.verdicts:
        judged = verdict.key
        found[f"evaluation/verdict/{judged.workload_title}/{judged.method}-k{judged.K}"] = verdict.headline
    for level in analysis.levels:
        name = f"{level.key.workload_title}/{level.key.load_name}/{level.key.method}-k{level.key.K}"
        for key, change in level.changes.items():
            if isinstance(change, TimeChange):
                found[f"evaluation/times_as_long/{name}/{key}"] = 1 + change.loss
            else:
                found[f"evaluation/change/{name}/{key}"] = change.value
    return found


def workloads_table(analysis: Analysis, names: MethodNames) -> Table:
    """Verdict and throughput of every workload side by side."""
    rows = [
        {
            "Workload": verdict.key.workload_title,
            "Method": names.at(verdict.key.method, verdict.key.K),
            "Verdict": Cell(verdict.headline, _TONES.get(verdict.decision, "unresolved")),
            "Over the traffic (%)": verdict.change,
        }
        | {
            f"c = {x.key.concurrency} (%)": change_cell(x.changes[THROUGHPUT.key], x.reached)
            for x in analysis.levels_of(verdict)
        }
        for verdict in analysis.verdicts
    ]
    return table("Every workload", rows, note("workloads"))


# On the terminal: the verdict, the one table it rests on, what to start. Everything else is in the report.


def print_brief(recipe: Recipe, analysis: Analysis) -> None:
    """What a decider needs, on one screen."""
    decisions = {(v.key, at.concurrency): at.decision for v in analysis.verdicts for at in v.levels}
    names = method_names(recipe)
    print_table(measured.brief_table([x for v in analysis.verdicts for x in analysis.levels_of(v)], names, decisions))
    print(f"\n{acceptance_line(analysis.acceptance, names)}")
    for v in analysis.verdicts:
        title = f"{v.key.workload_title} prompts, {names.at(v.key.method, v.key.K)}"
        print(f"{title}: {v.headline}\n{indent(v.reason, '  ')}")
    advice = advise(recipe, analysis)
    print(f"\n{advice.text}\n  {advice.flag or advice.command}")


def acceptance_line(summary: AcceptanceSummary, names: MethodNames) -> str:
    """Acceptance length of every method over all prompts, and how often the text stayed the same."""
    pooled = [m for m in summary.methods if m.category == ALL]
    lengths = ", ".join(f"{names[m.method]} {length_cell(m.length, m.prompts).text} (K = {m.K})" for m in pooled)
    shares = {measured.FLOOR if m == BASELINE else names[m]: share.value for m, share in summary.identical.items()}
    same = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
    text = f"Acceptance length at T = {summary.temperature:g}: {lengths}.{measured.hardly_accepted(summary, names)}"
    return f"{text} Responses identical to the baseline's: {same}." if same else text


# Of a published experiment, repeated: the post's tables and curves with intervals, and its own numbers.


def write_preset_report(recipe: Recipe, preset: Preset, plan: ServePlan, source: Path, directory: Path) -> Path:
    """Write report.html, report.md, the PNGs and runs.parquet, all runs in one file; returns the HTML's path.

    Args:
        recipe: of the measurement.
        preset: the experiment.
        plan: of it, with its tables.
        source: the serving artifact.
        directory: where to.
    """
    rows = read_serving(source)
    page = write_pages(build_preset_report(recipe, preset, plan, rows, read_manifest(source)), directory)
    write_rows(rows.runs, directory / "runs.parquet")
    return page


def build_preset_report(recipe: Recipe, preset: Preset, plan: ServePlan, rows: ServingRows, manifest: dict) -> Report:
    """Every table of the post in a section of its own, then what stands over all of them."""
    sections, every, names = [], [], method_names(recipe)
    for index, sweep in enumerate(plan.sweeps, 1):
        own = ServingRows(*(rows_of(frame, sweep.keys) for frame in rows))
        # Advice needs the throughput, whatever the post shows.
        measures = list(dict.fromkeys((THROUGHPUT.key, *sweep.measures)))
        levels = summarise_serving(own, measures)
        if not levels:  # all of its methods failed
            continue
        every += levels
        tables = _served(sweep.title, levels, own.requests, recipe, only_reached=False)
        places = summarise_places(own.requests.rename(columns={"output_tokens": "num_tokens"}))
        tables += [measured.places_table([*places], names)]
        tables += measured.matrix_tables(levels, names) if len({level.key.load for level in levels}) > 1 else []
        sections.append(_section(sweep.title, tables, serving_pictures(levels, names, f"table-{index}-", measures)))
    whole = [
        measured.limits_table(every, names, preset.tpot_limits_ms),
        measured.memory_table(rows.runs, names),
        published_table(every, names, recipe.target.path),
        measured.plan_table(plan, names, preset),
    ]
    left = manifest["counts"]["too_long"]
    too_long = (
        [f"{left} held-out prompts do not fit engine.max_model_len with their response: raise it"] if left else []
    )
    return Report(
        title=preset.title,
        question=preset.note,
        headline=f"repeated with {recipe.name}",
        facts=[("Target", recipe.target.path), ("Head", str(recipe.head_dir)), *_measured(manifest)],
        sections=[*sections, _section("Over all of it", whole)],
        caveats=[*_not_measured(manifest), *too_long, *(f"Left out: {reason}." for reason in plan.skipped)],
    )
