"""The whole chain through real vLLM and real DeepSpeed, and what its head must be worth."""

import html
from pathlib import Path

import pandas as pd
import pytest
from safetensors import safe_open

from drafthead.config import load_recipe
from drafthead.data.responses import LOOP_LIMIT
from drafthead.evaluation.columns import read_rows
from drafthead.evaluation.decision.analysis import analyse
from drafthead.evaluation.decision.verdict import reason_to_ignore
from drafthead.evaluation.measuring.acceptance import read_acceptance
from drafthead.evaluation.results.levels import MEASURE
from drafthead.files import in_markdown
from drafthead.statistics import length_difference
from tests.pipeline.small_run import overrides_for
from tests.warm import run_trainer, run_warm

pytestmark = pytest.mark.slow
SHORT = "eval.max_tokens=96"


def test_a_rerun_does_nothing_twice(tiny_run):
    root = Path(tiny_run.output_dir)

    def files():
        return {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}

    before = files()
    for script in ("data_gen/prompts.py", "data_gen/regenerate.py", "data_gen/harvest.py", "export/head.py"):
        run_warm(script, *overrides_for(root))
    assert files() == before


def check_gain(ours: pd.DataFrame, other: pd.DataFrame) -> None:
    """On the same prompts the gain is above zero with its whole interval."""
    both = ours.join(other, rsuffix="_other", how="inner")
    assert len(both) >= 40
    gain = length_difference(both["drafts"], both["accepted"], both["drafts_other"], both["accepted_other"])
    assert gain.low > 0, gain


def test_the_head_beats_ngram(tiny_run):
    head = overrides_for(Path(tiny_run.output_dir), SHORT)
    ours = _counters(head)
    check_gain(ours["head"], ours["ngram"])
    # Exported again, the card has what was measured, by workload.
    run_warm("export/head.py", *head)
    card = (tiny_run.head_dir / "README.md").read_text()
    for category in ("chat", "code", "long", "structured", "all"):
        assert f"{category} | 3 | 0 | " in card


def test_what_got_worse_stands_in_the_verdict_and_response_lengths_in_the_report(tiny_run):
    """One load, of more prompts than intervals need. Chunks of several tokens come at longer intervals by design."""
    overrides = overrides_for(Path(tiny_run.output_dir), SHORT, "eval.concurrency=[2]", "eval.prompts_per_level=24")
    printed = run_warm("eval/head.py", *overrides)
    recipe = load_recipe(overrides=overrides)
    page, markdown = ((recipe.results_dir / f"report.{kind}").read_text() for kind in ("html", "md"))
    analysis, named = analyse(recipe), []
    for verdict in analysis.verdicts:
        reason = " ".join(verdict.reason.split())
        assert reason in " ".join(printed.split())
        assert reason in html.unescape(" ".join(page.split()))
        assert in_markdown(verdict.reason) in markdown
        for level in analysis.levels_of(verdict):
            if reason_to_ignore(level):
                continue
            hits, fewer = (100 * level.prefix_hits[method] for method in ("none", "head"))
            if hits - fewer > max(1, 0.1 * hits):
                named.append("hits")
                assert f"prefix-cache hits (%) {hits:.1f} → {fewer:.1f} at 2" in reason
            for key, change in level.changes.items():
                measure, (before, after) = MEASURE[key], level.values[key]
                lost = 1 - after / before if measure.rate else after / before - 1
                if change.resolved and lost > 0.1:
                    named.append(key)
                    assert f"{measure.title} {measure.text(before)} → {measure.text(after)} at 2" in reason
    assert {"itl_mean", "hits"} <= {*named}
    requests = read_rows(recipe.results_dir / "serving", "requests-*.parquet")
    lengths = requests[requests["error"] == ""].groupby(["workload", "method"])["output_tokens"].mean()
    table = markdown.partition("\n### Every load")[2].partition("\n\n")[2].partition("\n\n")[0]
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines())
    shown = [dict(zip(header, row, strict=True)) for row in rows]
    assert len(shown) == len(lengths) == 4  # all prompts and conversations, without drafts and with the head
    for row in shown:
        method = "none" if row["Method"] == "no speculation" else "head"
        assert row["Response (tokens)"].partition(",")[0] == f"{lengths[row['Workload'], method]:.1f}"


@pytest.mark.long
def test_the_head_beats_its_blind_twin(tiny_run, tmp_path):
    head = overrides_for(Path(tiny_run.output_dir), SHORT)
    twin = overrides_for(tmp_path, SHORT, "train.zero_hidden_states=true", "eval.methods=[head]")
    (tmp_path / "data").symlink_to(Path(tiny_run.output_dir) / "data")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ours").symlink_to(tiny_run.results_dir)  # whose baseline is taken once it is measured
    run_trainer(*twin)
    run_warm("export/head.py", *twin, "--no-serve-check")
    with safe_open(load_recipe(overrides=twin).head_dir / "model.safetensors", framework="pt") as file:
        assert not file.get_tensor("fc.weight").any(), "the blind twin must ignore states when served, too"
    ours, blind = _counters(head), _counters(twin)
    check_gain(ours["head"], blind["head"])


def _counters(overrides: tuple[str, ...]) -> dict[str, pd.DataFrame]:
    """Method -> drafts and accepted drafts by prompt, of those whose baseline response does not loop."""
    assert "Acceptance by position" in run_warm("eval/acceptance.py", *overrides)
    rows = read_acceptance(load_recipe(overrides=overrides).results_dir / "acceptance")
    assert (rows["accepted"] == rows["accepted_at"].map(sum)).all()
    assert (rows["accepted"] <= rows["proposed"]).all()
    assert (rows["proposed"] <= rows["k"] * rows["drafts"]).all()
    assert all(list(a) == sorted(a, reverse=True) for a in rows["accepted_at"])  # a position implies those before
    baseline = rows[rows["method"] == "none"].set_index("prompt_id")
    kept = set(baseline.index[baseline["repeated"] <= LOOP_LIMIT])
    rows = rows[rows["prompt_id"].isin(kept)]
    drafted = rows[rows["drafts"] > 0].set_index("prompt_id")
    return {str(method): group[["drafts", "accepted"]] for method, group in drafted.groupby("method")}
