"""Answers and hidden states in one pass beside two: how long either takes for the same prompts.

    python benchmarks/one_pass.py [RECIPE] [section.key=value ...] [--prompts 400] [--blocks 3]

One process, the recipe's engine settings, its first training prompts (`python data_gen/prompts.py` made them). Two
passes: a plain engine answers and parts are written, then a harvesting engine reads prompt and answer. One pass: a
capturing engine answers, parts and shards are written. Both end with everything on disk. They follow one another as
two, one, one, two (ABBA) in every block, so that what else the machine does hits both alike. Engine starts are not
counted, of which two passes need two; each engine answers eight or reads 32 texts untimed first.

Beside wall time stand the CPU seconds of the process, which hardly depend on what else the machine does.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from harvest import Taken, mean, print_median, time_harvest, time_jobs
from tqdm import tqdm

from drafthead.artifacts import made_by
from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe
from drafthead.data.responses import read_parts
from drafthead.generation.regenerate import list_parts, part_worker
from drafthead.generation.shards import list_jobs
from drafthead.target.spec import TargetSpec, load_target_spec


def answer(recipe: Recipe, spec: TargetSpec, prompts: int) -> Taken:
    """Answer the first prompts; with states.one_pass their states are stored too."""
    parts, left = [], prompts
    for part in list_parts(recipe, "train"):
        if left > 0:
            parts.append(replace(part, prompts=part.prompts[:left]))
        left -= len(part.prompts)
    with part_worker(recipe, spec) as answerer, tqdm(disable=True) as bar:
        first = replace(parts[0], path=recipe.directory("warm", "part"), prompts=parts[0].prompts[:8])
        return time_jobs(answerer, first, parts, bar)


def harvest(recipe: Recipe, spec: TargetSpec) -> Taken:
    """Read prompts and answers once more, and store the states."""
    recipe.states_dir("train").mkdir(parents=True)
    return time_harvest(recipe, spec, list_jobs(recipe, "train"))


def run_two(recipe: Recipe, spec: TargetSpec, prompts: int) -> list[Taken]:
    """Answers, then states."""
    return [answer(recipe, spec, prompts), harvest(recipe, spec)]


def run_one(recipe: Recipe, spec: TargetSpec, prompts: int) -> list[Taken]:
    """Both at once."""
    states = recipe.states.model_copy(update={"one_pass": True})
    return [answer(recipe.model_copy(update={"states": states}), spec, prompts)]


def run_block(recipe: Recipe, spec: TargetSpec, prompts: int) -> tuple[list[Taken], list[Taken], str]:
    """Two, one, one, two: mean times of the passes of either, and what was made."""
    runs: dict[Callable, list[list[Taken]]] = {run_two: [], run_one: []}
    for run in (run_two, run_one, run_one, run_two):
        with tempfile.TemporaryDirectory(dir=recipe.directory()) as directory:
            here = recipe.model_copy(update={"output_dir": directory})
            shutil.copytree(recipe.prompts_dir, here.prompts_dir)
            runs[run].append(run(here, spec, prompts))
            responses = list(chain.from_iterable(read_parts(here.responses_dir("train")).values()))
            shards = len(list(Path(directory).rglob("shard-*.safetensors")))
    tokens = [sum(len(getattr(r, name)) for r in responses) for name in ("prompt_ids", "response_ids")]
    made = f"{len(responses)} answers of {tokens[1]:,} tokens to prompts of {tokens[0]:,}, {shards} shards"
    two, one = ([mean(times) for times in zip(*found, strict=True)] for found in runs.values())
    return two, one, made


def main() -> None:
    recipe, args = recipe_from_command_line(
        __doc__, ("--prompts", {"type": int, "default": 400}), ("--blocks", {"type": int, "default": 3})
    )
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    made = made_by()
    print(f"{made['machine']}; {made['created']}; load average {os.getloadavg()[0]:.1f}", flush=True)
    ratios = []
    for block in range(args.blocks):
        (answers, states), (both,), what = run_block(recipe, spec, args.prompts)
        ratios.append(both.wall / (answers.wall + states.wall))
        print(
            f"block {block + 1}: {what}: answers {answers.wall:.2f} s + states {states.wall:.2f} s, "
            f"one pass {both.wall:.2f} s, ratio {ratios[-1]:.3f}; "
            f"CPU {answers.process_cpu:.2f} + {states.process_cpu:.2f}, {both.process_cpu:.2f}, "
            f"ratio {both.process_cpu / (answers.process_cpu + states.process_cpu):.3f}",
            flush=True,
        )
    print_median(ratios)


if __name__ == "__main__":
    run_recipe(main)
