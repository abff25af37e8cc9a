"""The README's two tables, without the rows of conversations, and its picture, from the results of a quickstart.

    python benchmarks/readme_figures.py                    # of results/tiny; the picture goes to docs/images
    python benchmarks/readme_figures.py output_dir=OUT     # of another run of the recipe

Make it on a quiet machine after `make quickstart`, and put what it prints in the place of what is there.
"""

import shutil
from collections.abc import Iterator

from drafthead.artifacts import require
from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import REPO_ROOT
from drafthead.evaluation.measuring.acceptance import KIND, read_acceptance
from drafthead.evaluation.results.levels import THROUGHPUT, LoadComparison, read_serving, summarise_serving
from drafthead.evaluation.results.summary import ALL, AcceptanceSummary, summarise_acceptance

PICTURE = "acceptance-length.png"
IMAGES = REPO_ROOT / "docs" / "images"
MEANINGS = {
    "chat": "chat: explain a function", "code": "code: complete a function", "long": "long: summarise a source",
    "structured": "structured: JSON of a signature",
}  # fmt: skip


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    directory = recipe.results_dir / KIND
    made = require(directory, KIND, "make quickstart")["made_by"]
    summary = summarise_acceptance(read_acceptance(directory))
    levels = summarise_serving(read_serving(recipe.results_dir / "serving"))
    levels = [level for level in levels if level.key.workload == ALL]
    for line in (*acceptance_lines(summary), "", *serving_lines(levels)):
        print(line)
    print(f"\n{summary.prompts} prompts, {summary.looping} of them loop; measured at commit {made['git_commit']}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    print(f"picture: {shutil.copy(recipe.results_dir / PICTURE, IMAGES)}")


def acceptance_lines(summary: AcceptanceSummary) -> Iterator[str]:
    """Markdown: acceptance length of head and n-gram by workload, all of them last."""
    yield "| workload | acceptance length, EAGLE-3 head | acceptance length, n-gram |"
    yield "|---|---|---|"
    for category in (*sorted({m.category for m in summary.methods} - {ALL}), ALL):
        cells = [f"{summary.of(method, category).length:.2f}" for method in ("head", "ngram")]
        cells.insert(0, MEANINGS.get(category, category))
        yield "| " + " | ".join(f"**{cell}**" if category == ALL else cell for cell in cells) + " |"


def serving_lines(levels: list[LoadComparison]) -> Iterator[str]:
    """Markdown: throughput at every load, and the wait for the first token at the highest."""
    yield "| serving, same prompts | baseline | with head | change |"
    yield "|---|---|---|---|"
    ordered = sorted(levels, key=lambda level: level.key.concurrency)
    for level in ordered:
        asked = "1 request at a time" if level.key.concurrency == 1 else f"{level.key.concurrency} at a time"
        base, head = level.values[THROUGHPUT.key]
        yield f"| output tok/s, {asked} | {base:.1f} | {head:.1f} | {_change(level, THROUGHPUT.key)} |"
    base, head = (1e3 * seconds for seconds in ordered[-1].values["ttft_p50"])
    asked = f"{ordered[-1].key.concurrency} at a time"
    change = _change(ordered[-1], "ttft_p50")
    yield f"| median time to first token, {asked} | {base:.1f} ms | {head:.1f} ms | {change} |"


def _change(level: LoadComparison, key: str) -> str:
    return level.changes[key].text().replace("-", "−")


if __name__ == "__main__":
    run_recipe(main)
