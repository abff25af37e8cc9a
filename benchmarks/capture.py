"""What capture costs a server: tokens per second with it, beside the same server without, in turns.

    python benchmarks/capture.py [RECIPE] [section.key=value ...] [--blocks 5] [--concurrency 8]

Two servers with the recipe's exported head (`eval.num_draft_tokens`) stay up side by side, one as `vllm serve` would
start it, one as `data_gen/adapt.py` does, with `adapt.rate` of the recipe and consent of every request. The held-out
prompts are sent to one at a time, as without, with, with, without (ABBA) in every block, with empty prefix caches. An
idle server uses no processor time worth naming, but holds its memory twice.
"""

import tempfile
from pathlib import Path

import numpy as np
from scipy import stats

from drafthead.adapting.control import serving
from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config.evaluation import LoadConfig
from drafthead.drafters.registry import drafter_of
from drafthead.engine.load import LoadRequest, run_load, warm_up
from drafthead.engine.server import Server, running_server
from drafthead.evaluation.workload import load_workload
from drafthead.statistics import CONFIDENCE

OPTIONS = (
    ("--blocks", {"type": int, "default": 5, "help": "of four runs each; default: 5"}),
    ("--concurrency", {"type": int, "default": 8, "help": "requests at a time; default: 8"}),
)
ORDER = ("without", "with", "with", "without")


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    requests = [LoadRequest(p.id, p.prompt_ids) for p in load_workload(recipe).prompts]
    load = LoadConfig(concurrency=args.concurrency)

    def speed(server: Server, title: str) -> float:
        server.reset_prefix_cache()
        result = run_load(server, requests, load=load, max_tokens=recipe.eval.max_tokens, title=title)
        return sum(r.output_tokens for r in result.good) / result.duration_s

    with tempfile.TemporaryDirectory() as directory:
        settings = recipe.adapt.model_copy(update={"consent": "given"})
        adapting = recipe.model_copy(update={"output_dir": directory, "adapt": settings})
        speculative = drafter_of(recipe.head).vllm.speculative_config(
            str(recipe.head_dir), recipe.eval.num_draft_tokens
        )
        plain = running_server(recipe, Path(directory) / "plain.log", speculative=speculative)
        with plain as without, serving(adapting, recipe.head_dir) as control:
            servers = {"without": without, "with": control.server}
            for server in servers.values():
                warm_up(server, requests[:8], recipe.eval.max_tokens)
            runs: dict[str, list[float]] = {name: [] for name in servers}
            for block in range(args.blocks):
                for name in ORDER:
                    runs[name].append(speed(servers[name], f"block {block + 1}, {name} capture"))
    print(f"{len(requests)} prompts, {args.concurrency} at a time; median of {2 * args.blocks} runs:")
    for name, speeds in runs.items():
        print(f"{name} capture: {np.median(speeds):.1f} tokens/s")
    changes = np.log(runs["with"]) - np.log(runs["without"])  # in a block, each with its neighbour
    low, high = stats.t.interval(CONFIDENCE, len(changes) - 1, changes.mean(), stats.sem(changes))
    low, value, high = (100 * np.expm1([low, changes.mean(), high])).tolist()
    print(f"capture at {recipe.adapt.rate:.0%}: {value:+.1f} % [{low:+.1f}, {high:+.1f}] (t interval over pairs)")


if __name__ == "__main__":
    run_recipe(main)
