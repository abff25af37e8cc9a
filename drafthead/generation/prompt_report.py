"""The prompts before the target responds: how many, of what, how long, and what was left out."""

import logging
from collections import Counter
from typing import Any

import jinja2
import pandas as pd
from rich.markdown import Markdown

from drafthead.config import Recipe
from drafthead.data.prompts import SPLITS, read_prompts
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.files import ForeignFileError, atomic_path, in_markdown
from drafthead.progress import terminal
from drafthead.target.tokenizer import load_tokenizer

SAMPLE = 5_000  # prompts per split whose length is measured; random ones, as splits are in the order of a hash


def report_prompts(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Print the report, and write it to results/NAME/prompts/report.md."""
    notes = list(manifest["counts"]["notes"])
    if dropped := manifest["counts"]["duplicates_dropped"]:
        notes.insert(0, f"{dropped} duplicate prompts were dropped")
    prompts = _measured(recipe, notes)
    workloads = []
    for (source, category), group in [*prompts.groupby(["source", "category"]), (("all", ""), prompts)]:
        counts = group["split"].value_counts().reindex(SPLITS, fill_value=0)
        workloads.append((source, category, counts, group["tokens"].quantile([0.5, 0.95, 1])))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("drafthead.generation"), undefined=jinja2.StrictUndefined
    )
    environment.filters["in_markdown"] = in_markdown
    template = environment.get_template("prompts.md.jinja")
    text = template.render(name=recipe.name, splits=SPLITS, workloads=workloads, sample=SAMPLE, notes=notes)
    terminal().print(Markdown(text))
    path = recipe.results_dir / "prompts" / "report.md"
    text += "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    logging.getLogger(__name__).info("report: %s", path)


def _measured(recipe: Recipe, notes: list[str]) -> pd.DataFrame:
    """A row per prompt, with its length in tokens where it was measured; adds to the notes why others have none."""
    rows, left_out, render = [], Counter[str](), None
    try:
        render = renderer(recipe, load_tokenizer(recipe))
    except (OSError, ForeignFileError) as error:  # the stages that need it refuse
        notes.append(f"no lengths: the target's tokenizer is not on this machine, or damaged ({error})")
    for split in SPLITS:
        for number, prompt in enumerate(read_prompts(recipe.prompts_dir, split)):
            tokens = float("nan")
            try:
                if render and number < SAMPLE:
                    tokens = len(render(prompt, recipe.eval.reasoning_effort))
            except UnrenderableError as error:
                left_out[error.reason] += 1
            rows.append((prompt.source, prompt.category, split, tokens))
    notes += [f"{count} of the measured prompts cannot be rendered: {reason}" for reason, count in left_out.items()]
    return pd.DataFrame(rows, columns=["source", "category", "split", "tokens"])
