"""The report in a real browser: headless Chromium loads the file, and every figure has pixels."""

import re
import shutil
import subprocess

import pytest

from drafthead.evaluation.decision.analysis import analyse
from drafthead.evaluation.reporting.report import build_report, write_pages
from tests.evaluation.rows import write_results
from tests.recipes import tiny_recipe

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Written into a copy of the page: the browser itself says how large each image came out.
_PROBE = """<script>addEventListener("load", () => {
  const sizes = [...document.images].map(i => `${i.naturalWidth}x${i.naturalHeight}@${i.clientWidth}`).join(" ");
  const page = document.documentElement, overflow = page.scrollWidth - page.clientWidth;
  document.body.insertAdjacentHTML("beforeend", `<pre id=probe>${sizes} overflow=${overflow}</pre>`);
});</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_every_figure_is_rendered_and_a_narrow_page_fits(tmp_path):
    """The report of two draft lengths on two workloads, which has every kind of figure."""
    recipe = tiny_recipe(tmp_path, "eval.traffic.workload=null")
    write_results(recipe, head_speed={1: 1.3, 8: 0.8}, lengths=(1, 3), workloads=("chat", "code"))
    page = write_pages(build_report(recipe, analyse(recipe)), recipe.results_dir)
    page.write_text(page.read_text().replace("</body>", f"{_PROBE}</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=500,900", "--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    probe = re.search(r'<pre id="probe">(.*?)</pre>', dom).group(1)
    figures = re.findall(r"(\d+)x(\d+)@(\d+)", probe)
    assert len(figures) == 6  # two of acceptance, and of each workload its curves and acceptance by K
    for natural_width, natural_height, shown_width in figures:
        assert int(natural_width) > 800
        assert int(natural_height) > 300
        assert int(shown_width) > 250
    assert probe.endswith("overflow=0")
