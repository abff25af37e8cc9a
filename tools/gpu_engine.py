"""An engine that drafts: what it runs, and how much of its drafts the target accepts; a part of tools/gpu_check.py.

    python tools/gpu_engine.py --runner V2 [--length 2.5] [RECIPE] [section.key=value ...]

The first of eval.methods drafts for the recipe's held-out prompts, at the first of eval.temperatures. Prints one line;
exit code 1 if the engine runs something else, has captured no CUDA graph on a GPU, or accepts too little.
"""

import sys
from typing import Any

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.engine.generate import Engine, GenerationRequest
from drafthead.engine.offline import keep_engines_in_this_process, offline_engine, on_cpu
from drafthead.evaluation.workload import load_workload, speculative_config

OPTIONS = (
    ("--runner", {"choices": ("V1", "V2"), "required": True, "help": "vLLM's model runner that is expected"}),
    ("--length", {"type": float, "help": "acceptance length that is expected, within 5 %%; else more than 1.2"}),
)
_V2 = "vllm.v1.worker.gpu.model_runner"


def what_runs(worker: Any) -> tuple[str, int]:
    """A worker's model runner, and how many CUDA graphs it has captured; runs in the worker's process."""
    from vllm.compilation.counter import compilation_counter

    modules = {kind.__module__ for kind in type(worker.model_runner).__mro__}
    return "V2" if _V2 in modules else "V1", compilation_counter.num_cudagraph_captured


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    keep_engines_in_this_process()
    speculative, temperature = speculative_config(recipe, recipe.eval.methods[0].name), recipe.eval.temperatures[0]
    prompts = [prompt.prompt_ids for prompt in load_workload(recipe).prompts]
    options = {"speculative_config": speculative, "per_request_spec_decode_metrics": "detailed"}
    with offline_engine(recipe, seeded=temperature > 0, **options) as llm:
        [(runner, graphs)] = set(llm.collective_rpc(what_runs))  # every rank says the same
        requests = [GenerationRequest(prompt, recipe.eval.max_tokens, temperature, None) for prompt in prompts]
        counters = [generation.counters for generation in Engine(llm).generate(requests)]
    accepted = [count for counter in counters if counter for count in counter.per_step_accepted]
    length = 1 + sum(accepted) / max(len(accepted), 1)
    enough = length > 1.2 if args.length is None else abs(length / args.length - 1) <= 0.05
    print(f"model runner {runner}, {graphs} CUDA graphs, acceptance length {length:.2f} over {len(accepted):,} drafts")
    sys.exit(0 if runner == args.runner and enough and (graphs or on_cpu()) else 1)


if __name__ == "__main__":
    run_recipe(main)
