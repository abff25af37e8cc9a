"""Which vLLM versions this project works with: the stages that run vLLM, in environments of yours, a table row each.

    python tools/vllm_versions.py OUT /path/to/venv/bin/python ... [section.key=value ...]

OUT is the output_dir of a finished run of the embedded recipe, made with the same overrides. In a folder of its own
every environment harvests the run's responses again, exports the run's head and serves it (the export compares vLLM's
counters with the replay), measures acceptance and answers held-out prompts through a server, with and without the
head. A stage that fails does not stop the others; its last line is printed.
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from drafthead.artifacts import read_json
from drafthead.config import REPO_ROOT


def harvested(folder: Path) -> str:
    """How often the target's argmax at a stored state is the token that it said."""
    counts = read_json(folder / "data/tiny/states/validation/manifest.json")["counts"]
    return f"argmax is the text at {counts['argmax_agreement']:.1%}"


def accepted(folder: Path) -> str:
    """Acceptance length by vLLM's counters in process."""
    rows = pd.read_parquet(folder / "results/tiny/acceptance/method-eagle3.parquet")
    return f"acceptance length {1 + rows['accepted'].sum() / rows['drafts'].sum():.2f}"


def served(folder: Path) -> str:
    """The same by a server's counters."""
    runs = pd.concat(map(pd.read_parquet, (folder / "results/tiny/serving").glob("runs-*.parquet")))
    return f"acceptance length {1 + runs['accepted'].sum() / runs['drafts'].sum():.2f}, {runs['failed'].sum()} failed"


def exported(folder: Path) -> str:
    """The check of the export refuses what does not fit the replay."""
    return "within 5 % of the replay" if (folder / "heads/tiny/manifest.json").exists() else "no head"


STAGES = (
    ("harvest", "data_gen/harvest.py", harvested),
    ("export, served", "export/head.py", exported),
    ("acceptance", "eval/acceptance.py", accepted),
    ("server", "eval/serving.py", served),
)
SMALL = ("eval.concurrency=[2]", "eval.prompts_per_level=8", "eval.methods=[head]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="output_dir of a finished run of the embedded recipe")
    parser.add_argument("pythons", nargs="+", help="interpreters, then overrides of the recipe")
    options = parser.parse_args()
    overrides = [text for text in options.pythons if "=" in text]
    print("| vLLM | " + " | ".join(name for name, _, _ in STAGES) + " |\n|" + "---|" * (len(STAGES) + 1))
    for python in (text for text in options.pythons if "=" not in text):
        with tempfile.TemporaryDirectory(prefix="vllm-version-") as folder:
            share_inputs(options.out.resolve(), Path(folder))
            cells = [try_stage(python, script, Path(folder), overrides, figure) for _, script, figure in STAGES]
        print(f"| {version_of(python)} | " + " | ".join(cells) + " |", flush=True)


def share_inputs(out: Path, folder: Path) -> None:
    """Prompts, responses and the training run; everything that vLLM makes is made anew."""
    (folder / "data" / "tiny").mkdir(parents=True)
    for part in ("prompts", "responses"):
        (folder / "data" / "tiny" / part).symlink_to(out / "data" / "tiny" / part)
    (folder / "runs").symlink_to(out / "runs")


def version_of(python: str) -> str:
    """vLLM's version in that environment."""
    command = [python, "-c", "import vllm; print(vllm.__version__)"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip().splitlines()[-1] if result.returncode == 0 else "no vLLM"


def try_stage(python: str, script: str, folder: Path, overrides: list[str], figure: Callable[[Path], str]) -> str:
    """Run a stage: its figure, or the last line of what went wrong."""
    command = [python, script, f"output_dir={folder}", *overrides, *SMALL]
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False, env=environment)
    if result.returncode == 0:
        return figure(folder)
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    message = next(
        (line for line in reversed(lines) if re.match(r"\w*(Error|Exception)\b", line)), (lines or ["?"])[-1]
    )
    return f"fails: {message[:160]}"


if __name__ == "__main__":
    main()
