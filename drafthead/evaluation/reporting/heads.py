"""Acceptance of several heads on one store, prompt by prompt, and the table that compares them.

One row per head, way of counting, draft length and prompt, in results/NAME-HEAD/heads.parquet:

    kind, layers, seed   which head; `control` where it was trained on zeroed hidden states
    parameters, seconds  that were trained, and how long, on the machine that did
    how                  served: vLLM's counters on held-out prompts, greedy or at a temperature; replayed: without an
                         engine, on validation prompts
    k, prompt            draft tokens per round; which prompt
    drafts, accepted     counters

Seeds share prompts and differ in the head, so both vary: the interval of a length is over prompts, with the counters of
all seeds pooled, and the lengths of the seeds alone stand beside it; that of a change is over prompts and seeds.
"""

from typing import Any

import pandas as pd

from drafthead.config import Recipe
from drafthead.config.evaluation import HEAD
from drafthead.data.responses import LOOP_LIMIT
from drafthead.evaluation.measuring.acceptance import KIND, read_conditions
from drafthead.evaluation.reporting.tables import Cell, Table, change_cell, length_cell, table
from drafthead.evaluation.workload import BASELINE
from drafthead.statistics import acceptance_length, acceptance_length_interval, length_change

SERVED, REPLAYED = "served", "replayed"


def served_rows(recipe: Recipe) -> pd.DataFrame:
    """Of the acceptance that eval/acceptance.py measured of the recipe's own head; looping responses left out."""
    found, several = [], len(recipe.eval.reasoning_efforts) > 1
    measured = read_conditions(recipe.results_dir / KIND)
    for (temperature, effort), rows in measured.groupby(["temperature", "effort"], sort=False):
        baseline = rows[(rows["method"] == BASELINE) & ~rows["again"]].set_index("prompt_id")["repeated"]
        own = rows[(rows["method"] == HEAD) & (rows["prompt_id"].map(baseline) <= LOOP_LIMIT)]
        how = [SERVED, *[f"T = {temperature:g}"] * bool(temperature), *[f"effort {effort}"] * several]
        found.append(own.assign(how=", ".join(how)))
    return pd.concat(found)[["k", "prompt_id", "drafts", "accepted", "how"]].rename(columns={"prompt_id": "prompt"})


def comparison_table(rows: pd.DataFrame) -> Table:
    """One line per head and way of counting: what it cost, acceptance length at every draft length, and the control.

    Beside each length stands its change against the first head of as many layers.
    """
    lines = []
    first = rows["kind"].iloc[0]
    for (kind, layers, how), found in rows[~rows["control"]].groupby(["kind", "layers", "how"], sort=False):
        line: dict[str, Any] = {
            "head": str(kind), "counted": str(how), "layers": layers, "seeds": found["seed"].nunique(),
            "parameters (M)": Cell(f"{found['parameters'].iloc[0] / 1e6:.2f}"),
        }  # fmt: skip
        line["training (min)"] = Cell(f"{found.drop_duplicates('seed')['seconds'].mean() / 60:.1f}")
        alike = rows.query("layers == @layers and how == @how")
        for k, at in found.groupby("k"):
            own = counters(at)
            line[f"K = {k}"] = pooled_length(own)
            if line["seeds"] > 1:
                alone = [acceptance_length(own["drafts"][seed], own["accepted"][seed]) for seed in own["drafts"]]
                line[f"seeds, K = {k}"] = Cell(f"{min(alone):.2f} to {max(alone):.2f}")
            against = alike.query("kind == @first and k == @k and not control")
            if kind != first and len(against):
                line[f"change, %, K = {k}"] = change_against(own, counters(against))
        if len(same := alike.query("kind == @kind and control")):
            longest = same["k"].max()
            line[f"without states, K = {longest}"] = pooled_length(counters(same.query("k == @longest")))
        lines.append(line)
    return table(
        "Acceptance length of heads on one store",
        lines,
        f"with 95 % intervals over prompts; change: against {first}, paired by prompt, with 95 % intervals over "
        "prompts and seeds; without states: trained and served on zeroed hidden states",
    )


def counters(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns (drafts, seed) and (accepted, seed), a row per prompt."""
    return rows.pivot_table(["drafts", "accepted"], "prompt", "seed", fill_value=0)


def pooled_length(own: pd.DataFrame) -> Cell:
    """Acceptance length with its interval over prompts, the counters of seeds pooled."""
    drafts, accepted = (own[name].to_numpy().sum(1) for name in ("drafts", "accepted"))
    return length_cell(acceptance_length_interval(drafts, accepted), len(own))


def change_against(own: pd.DataFrame, other: pd.DataFrame) -> Cell | None:
    """Change of the length over the prompts of both: heads with data of their own may have others, and other loops."""
    shared = own.index.intersection(other.index)
    ours, others = ((one["drafts"].loc[shared], one["accepted"].loc[shared]) for one in (own, other))
    same_seeds = own["drafts"].columns.equals(other["drafts"].columns)
    return change_cell(length_change(ours, others, same_seeds)) if len(shared) else None
