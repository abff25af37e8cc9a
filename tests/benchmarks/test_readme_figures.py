"""The README's tables: what the script prints has the form that stands there, and the picture is there."""

import re

from benchmarks.readme_figures import acceptance_lines, serving_lines
from drafthead.config import REPO_ROOT
from drafthead.evaluation.measuring.acceptance import KIND, read_acceptance
from drafthead.evaluation.results.levels import read_serving, summarise_serving
from drafthead.evaluation.results.summary import summarise_acceptance
from tests.evaluation.rows import write_results
from tests.recipes import tiny_recipe


def _form(line: str) -> str:
    """Without the figures."""
    return re.sub(r"[+−-]?\d+(\.\d+)?", "0", line)


def test_the_tables_have_the_form_of_those_in_the_readme(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_results(recipe, head_speed={1: 1.3, 8: 0.8})
    printed = [
        *acceptance_lines(summarise_acceptance(read_acceptance(recipe.results_dir / KIND))),
        *serving_lines(summarise_serving(read_serving(recipe.results_dir / "serving"))),
    ]
    written = {_form(line) for line in (REPO_ROOT / "README.md").read_text().splitlines()}
    optional = re.compile(r"no interval|median time to first token")  # small waves have no interval
    assert len(printed) == 12
    assert [line for line in printed if _form(line) not in written and not optional.search(line)] == []
