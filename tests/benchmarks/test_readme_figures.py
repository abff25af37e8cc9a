"""The README's tables: what the script prints has the form that stands there, and the picture is there."""

import re

from benchmarks.readme_figures import acceptance_lines, serving_lines
from drafthead.config import REPO_ROOT
from drafthead.evaluation.measuring.acceptance import acceptance_dir, read_acceptance
from drafthead.evaluation.results.levels import summarise_serving
from drafthead.evaluation.results.summary import summarise_acceptance
from tests.evaluation.rows import served
from tests.recipes import tiny_recipe


def _form(line: str) -> str:
    """Without the figures."""
    return re.sub(r"[+−-]?\d+(\.\d+)?", "0", line)


def test_the_tables_have_the_form_of_those_in_the_readme(tmp_path):
    recipe = tiny_recipe(tmp_path)
    levels = summarise_serving(served(recipe, head_speed={1: 1.3, 8: 0.8}))
    summary = summarise_acceptance(read_acceptance(acceptance_dir(recipe)))
    printed = [*acceptance_lines(summary), *serving_lines(levels)]
    written = {_form(line) for line in (REPO_ROOT / "README.md").read_text().splitlines()}
    optional = re.compile(r"no interval|median time to first token")  # small waves have no interval
    assert len(printed) == 12
    assert [line for line in printed if _form(line) not in written and not optional.search(line)] == []
