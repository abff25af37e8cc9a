"""From rows with a known outcome to tables, verdict, HTML, Markdown and PNGs."""

import itertools
import re
from dataclasses import replace

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from drafthead.artifacts import ArtifactError, begin, finish, read_json, write_json
from drafthead.evaluation.decision.analysis import analyse
from drafthead.evaluation.decision.verdict import DEPLOY, DO_NOT, UNKNOWN
from drafthead.evaluation.measuring import acceptance
from drafthead.evaluation.reporting.report import build_report, print_brief, render, workloads_table, write_pages
from drafthead.evaluation.results.levels import completed, summarise_serving
from drafthead.evaluation.results.summary import summarise_acceptance, summarise_places
from drafthead.statistics import acceptance_length_interval
from tests.evaluation.rows import LENGTHS, NAMES, POSITIONS, K, slower, write_results
from tests.recipes import tiny_recipe
from tests.scripts import run_here

SPEEDS = {1: 1.3, 8: 1.0, 32: 0.7, 200: 1.3}  # faster, noise, slower, faster but not reached


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    recipe = tiny_recipe(tmp_path_factory.mktemp("report"), "eval.price_per_gpu_hour=3.6")
    write_results(recipe, head_speed=SPEEDS, prompts=160)
    return recipe


@pytest.fixture(scope="module")
def analysis(recipe):
    return analyse(recipe)


@pytest.fixture(scope="module")
def report(recipe, analysis):
    found = build_report(recipe, analysis)
    write_pages(found, recipe.results_dir)
    return found


def rendered_tables(markdown: str) -> list[list[list[str]]]:
    """(tables, rows, cells) as a reader of the rendered page sees them, the header first."""
    tables: list[list[list[str]]] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    for token, inside in itertools.pairwise(tokens):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type in ("th_open", "td_open"):
            tables[-1][-1].append("".join(child.content for child in inside.children or ()))
    return tables


def test_acceptance_is_shown_by_position(recipe, report):
    """The head's, which is made up to accept less and less; of n-gram, where its rounds lie is not known."""
    summary = summarise_acceptance(acceptance.read_acceptance(recipe.results_dir / "acceptance"))
    found = {(at.place, at.first): at for at in summary.places}
    assert {at.method for at in summary.places} == {"head"}
    after = "prompt and response"  # behind 100 tokens of prompt
    assert list(found) == [("prompt", 64), ("response", 0), ("response", 64), (after, 64), (after, 128)]
    assert found["prompt", 64].prompts == 150
    assert found["prompt", 64].length == summary.of("head").length
    assert found["response", 0].length.low > found["response", 64].length.high
    assert found[after, 64].length.low > found["response", 0].length.value > found[after, 128].length.high
    (table,) = [t for section in report.sections for t in section.tables if t.title == "Acceptance by position"]
    shown = {row[2].text + row[3].text: row[5].text for row in table.rows}
    assert shown["response0 to 63"] == f"{found['response', 0].length:.2f}"


def test_acceptance_under_load_leaves_looping_prompts_out(report):
    """As acceptance offline does; in the rows every draft of a loop is accepted."""
    tables = {t.title: t for section in report.sections for t in section.tables}
    pooled = dict(zip(tables["Acceptance under load"].frame, tables["Acceptance under load"].rows[0], strict=True))
    assert pooled["Prompts"].text == "152"  # of 160
    assert pooled["Length"].text == f"{LENGTHS[K]:.2f} [{LENGTHS[K]:.2f}, {LENGTHS[K]:.2f}]"
    assert [pooled[f"Position {i} (%)"].text for i in (1, 2, 3)] == [f"{100 * share:.1f}" for share in POSITIONS]
    wide = tables["Every load: same prompts as the baseline"]
    lengths = {dict(zip(wide.frame, row, strict=True))["Acceptance length"].text for row in wide.rows}
    assert lengths == {"–", pooled["Length"].text}


def test_a_prompt_that_loops_under_one_load_counts_under_the_others(analysis):
    """And its speed counts under all; a response without a draft at every step has no place."""
    requests, runs = analysis.rows
    third = (requests["method"] == "head") & (requests["prompt_id"] == "p002")  # accepts nothing
    steps = [[0] * 60 if bad else own for bad, own in zip(third, requests["accepted_by_step"], strict=True)]
    requests = requests.assign(accepted_by_step=steps)
    baseline, first = requests["method"] == "none", requests["prompt_id"] == "p000"
    requests = requests.assign(repeated=requests["repeated"].mask(baseline & first & (requests["load"] == "c1"), 0.5))
    again = completed(requests, runs)
    drafts = again.requests[(again.requests["method"] == "head") & first].set_index("load")["drafts"]
    assert drafts.eq(0).to_dict() == {load: load == "c1" for load in drafts.index}
    assert len(drafts) > 2
    before, after = (
        next(level for level in summarise_serving(rows) if level.key.concurrency == 1)
        for rows in (analysis.rows, again)
    )
    assert before.values == after.values
    assert before.length_of_all == after.length_of_all
    counts = again.requests[(again.requests["method"] == "head") & (again.requests["load"] == "c1") & ~first]
    by_prompt = counts[counts["drafts"] > 0].groupby("prompt_id")[["drafts", "accepted"]].sum()
    assert after.acceptance_length == acceptance_length_interval(by_prompt["drafts"], by_prompt["accepted"])
    assert after.acceptance_length.low < after.acceptance_length.value
    head = requests[requests["method"] == "head"].rename(columns={"output_tokens": "num_tokens"})
    preempted = head.assign(num_tokens=head["num_tokens"].mask(head["prompt_id"] == "p001", 500))
    whole, without = ({at.prompts for at in summarise_places(rows)} for rows in (head, preempted))
    assert max(without) == max(whole) - 1
    assert not [*summarise_places(head.assign(num_tokens=500))]


def test_other_peoples_words_are_no_markup(recipe, analysis):
    summary = analysis.acceptance
    hostile = "<img src=http://x.invalid/a.png>|\n# made up $\\frac$"
    methods = [replace(m, category=hostile if m.category == "chat" else m.category) for m in summary.methods]
    served = analysis.manifests["serving"]
    lost = {"serving": served | {"counts": served["counts"] | {"failed": [f"lost-k3-tp1: {hostile}"]}}}
    summary = replace(summary, methods=methods)
    report = build_report(recipe, replace(analysis, manifests=analysis.manifests | lost, acceptance=summary))
    assert any("lost-k3-tp1: " in caveat for caveat in report.caveats)
    for name in ("report.html", "report.md"):
        text = render(report, f"{name}.jinja")
        assert "<img src=http" not in text
        assert "&lt;img src=http" in text
    assert "\n# made up" not in text
    assert "--speculative-config '{" in text  # the command is for a shell


def test_one_start_of_each_server_is_said_whatever_the_recipe_says_today(recipe, analysis):
    assert any("One server start" in caveat for caveat in build_report(recipe, analysis).caveats)
    more = recipe.changed("eval", repeats=3)
    assert any("One server start" in caveat for caveat in build_report(more, analysis).caveats)
    runs = pd.concat([analysis.rows.runs.assign(block=block) for block in range(3)])
    repeated = replace(analysis, rows=analysis.rows._replace(runs=runs))
    assert not any("One server start" in caveat for caveat in build_report(recipe, repeated).caveats)


def test_html_is_one_file_that_loads_nothing(recipe, report):
    html = (recipe.results_dir / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 3  # acceptance by workload and position, curves
    assert not re.search(r"""(?:src|href|srcset)=["'](?!data:)""", html)
    assert "<script" not in html
    assert "--speculative-config" in html
    assert re.search(r'<td class=" ?unresolved">', html)


def test_the_markdown_renders_every_table_and_picture(recipe, report):
    text = (recipe.results_dir / "report.md").read_text()
    tables = [table for section in report.sections for table in section.tables]
    assert len(tables) >= 7
    assert rendered_tables(text) == [[list(t.frame), *([cell.text for cell in row] for row in t.rows)] for t in tables]
    pictures = [f"{picture.name}.png" for section in report.sections for picture in section.pictures]
    assert re.findall(r"\]\((.+?\.png)\)", text) == pictures
    assert all((recipe.results_dir / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_the_tables_hold_what_the_rows_were_made_with(report):
    tables = {t.title: t for section in report.sections for t in section.tables}
    rows = [[cell.text for cell in row] for table in tables.values() for row in table.rows]
    assert any(row[:2] == ["EAGLE-3 head, K = 3", "90,000"] and row[2] == "-10.0" for row in rows)  # KV cache taken
    means = tables["Geometric means over concurrency"]
    cell = means.rows[0][list(means.frame).index("Output throughput (tok/s)")]
    # 1.3 · 1.0 · 0.7 over the three levels that were reached; concurrency 200 was not.
    change, worst = re.fullmatch(r".* → \S+, (\S+) % \(worst (\S+) % at 32\)", cell.text).groups()
    assert -5 < float(change) < -2
    assert -31 < float(worst) < -28
    assert cell.tone == "unresolved"  # better at one load, worse at another


def test_a_gain_at_a_load_that_was_not_reached_is_grey_beside_the_workloads(analysis):
    (row,) = workloads_table(analysis, NAMES).frame.to_dict("records")
    assert [row[f"c = {c} (%)"].tone for c in SPEEDS] == ["better", "unresolved", "worse", "unresolved"]


def test_the_brief_fits_one_screen(recipe, analysis, capsys):
    print_brief(recipe, analysis)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 40
    assert printed.count("┏") == 1  # one table
    assert analysis.main.headline in printed
    assert "--speculative-config" in printed
    decisions = re.findall(r"\d │ +([A-Z ]+?) +│$", printed, re.MULTILINE)
    assert decisions == [DEPLOY, UNKNOWN, DO_NOT, UNKNOWN]


def test_an_unsteady_machine_is_named_on_the_terminal_and_in_the_report(tmp_path, capsys):
    """All prompts gain; each workload, measured afterwards, loses."""
    recipe = tiny_recipe(tmp_path)
    write_results(recipe, head_speed={1: 1.3}, prompts=160, workloads=("all", "chat", "code"))
    for path in (recipe.results_dir / "serving").glob("*-head.parquet"):
        rows = pd.read_parquet(path)
        pd.concat([slower(own, 1 if name == "all" else 2) for name, own in rows.groupby("workload")]).to_parquet(path)
    assert run_here("eval/report.py", f"output_dir={tmp_path}") == 0
    printed = capsys.readouterr().out
    assert f"all prompts, EAGLE-3 head, K = 3: {UNKNOWN}" in printed
    texts = (printed, *((recipe.results_dir / f"report.{kind}").read_text() for kind in ("html", "md")))
    assert all("the machine was not steady" in " ".join(text.split()) for text in texts)


def test_measurements_that_do_not_belong_together_are_refused(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_results(recipe, head_speed={1: 1.3}, prompts=16)
    manifest = recipe.results_dir / "serving" / "manifest.json"
    written = read_json(manifest)
    others = {"head": "2" * 64, "max_tokens": 64, "dtype": "float16"}
    write_json(manifest, written | {"identity": written["identity"] | others})
    with pytest.raises(ArtifactError) as refused:
        analyse(recipe)
    for key, value in others.items():
        assert f"{key}: found {value!r}, wanted {written['identity'][key]!r}" in str(refused.value)


def test_a_head_that_was_exported_anew_is_not_advised(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_results(recipe, head_speed={1: 1.3}, prompts=16)
    begin(recipe.head_dir, "head", {})
    finish(recipe.head_dir, {})
    with pytest.raises(ArtifactError, match="not the head that was measured"):
        analyse(recipe)


def test_a_missing_measurement_names_the_command(tmp_path):
    with pytest.raises(ArtifactError, match="python eval/acceptance.py"):
        analyse(tiny_recipe(tmp_path))
