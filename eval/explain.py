"""Why is the served acceptance lower than the predicted one?

    python eval/explain.py [RECIPE] [--head DIR] [--prompts N] [--responses N] [section.key=value ...]

Compares the served head with the checkpoint it comes from and with the target. Then validation and held-out prompts are
both predicted, by replay, and served, by workload and position: what differs on the same prompts is serving, what
differs between the two predictions is the prompts. At every temperature of eval.temperatures above 0 the held-out
prompts are predicted from responses that the target sampled alone, and served, with greedy drafts and sampled ones.
"""

from dataclasses import replace
from pathlib import Path

from drafthead.artifacts import begin, finish
from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe
from drafthead.config.evaluation import SEED
from drafthead.data.prompts import read_prompts
from drafthead.data.responses import Response
from drafthead.data.shard import shard_path
from drafthead.data.store import StateStore
from drafthead.drafters.base import DraftShape
from drafthead.drafters.replay import Acceptance
from drafthead.drafters.trained import Checkpoint, best_checkpoint, read_checkpoint
from drafthead.engine.generate import Engine, GenerationRequest
from drafthead.engine.offline import offline_engine
from drafthead.evaluation.reporting.explaining import (
    HELDOUT,
    VALIDATION,
    Compared,
    explain_gap,
    first_difference,
    gap_table,
)
from drafthead.evaluation.reporting.tables import print_table
from drafthead.evaluation.workload import EvalPrompt, load_workload
from drafthead.exporting.check import (
    choose_documents,
    expected_rounds,
    head_differences,
    replayed_rounds,
    serve_documents,
)
from drafthead.generation.harvest import backend
from drafthead.generation.shards import ShardJob, states_identity
from drafthead.progress import progress_bar
from drafthead.target.spec import load_target_spec

OPTIONS = (
    ("--head", {"type": Path, "metavar": "DIR", "help": "the served head (default: the recipe's)"}),
    ("--prompts", {"type": int, "default": 64, "help": "at most, of each split (default: 64)"}),
    ("--responses", {"type": int, "default": 1, "help": "to each prompt at a temperature above 0 (default: 1)"}),
)
_AGAIN = "~"  # between the id of a prompt and the number of a further response to it


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    head = args.head or recipe.head_dir
    source = read_checkpoint(best_checkpoint(recipe.run_dir))
    shape = source.shape(load_target_spec(recipe.target_path, recipe.target.revision))
    differences = head_differences(recipe, head, source, shape)
    print(f"{head} against {source.path}: " + ("served as it was trained" if not differences else "it differs"))
    for line in differences:
        print(f"- {line}")
    rows = compared(recipe, head, source, shape, args.prompts)
    hot = [t for t in recipe.eval.temperatures if t > 0]
    sizes = args.prompts, args.responses
    sampled = [row for t in hot for row in compared_at(t, recipe, head, source, shape, *sizes)]
    print_table(gap_table([*rows, *sampled]))
    print("\n".join(["", *explain_gap(rows)]))


def compared(recipe: Recipe, head: Path, source: Checkpoint, shape: DraftShape, prompts: int) -> list[Compared]:
    """Validation and held-out prompts, each predicted and served."""
    weights, workloads = source.weights(), workloads_of(recipe)
    documents, splits, predicted = [], [], []
    for split, states in ((VALIDATION, recipe.states_dir("validation")), (HELDOUT, heldout_states(recipe, prompts))):
        store = StateStore(states)
        found, _ = choose_documents(store, recipe, prompts, recipe.engine.max_model_len * prompts)
        documents += found
        splits += [split] * len(found)
        predicted += replayed_rounds(recipe, store, found, weights, shape)
    served = serve_documents(recipe, head, documents)
    return [
        Compared(
            document.id, workloads.get(document.id, "conversations"), split, rounds, counted,
            first_difference(document.response_ids, ids),
        )
        for document, split, rounds, (ids, counted) in zip(documents, splits, predicted, served, strict=True)
    ]  # fmt: skip


def compared_at(
    temperature: float, recipe: Recipe, head: Path, source: Checkpoint, shape: DraftShape, prompts: int, responses: int
) -> list[Compared]:
    """Held-out prompts at a temperature above 0: expected, and served with greedy and with sampled drafts.

    All responses to a prompt are one row: what is resampled is prompts.
    """
    store, workloads = StateStore(heldout_states(recipe, prompts, temperature, responses)), workloads_of(recipe)
    count = prompts * responses
    documents, _ = choose_documents(store, recipe, count, recipe.engine.max_model_len * count, drop_loops=False)
    both = expected_rounds(recipe, store, documents, source.weights(), shape, temperature)
    found = []
    for sampled, predicted in enumerate(both if recipe.export.format == "vllm" else both[:1]):
        split = f"T = {temperature:g}" + ", drafts sampled" * sampled
        served = serve_documents(recipe, head, documents, temperature=temperature, sampled=bool(sampled))
        rounds: dict[str, tuple[Acceptance, Acceptance]] = {}
        for document, expected, (_, counted) in zip(documents, predicted, served, strict=True):
            prompt = document.id.partition(_AGAIN)[0]
            before = rounds.get(prompt)
            rounds[prompt] = (before[0] + expected, before[1] + counted) if before else (expected, counted)
        found += [
            Compared(prompt, workloads.get(prompt, "conversations"), split, *both_sides, None)
            for prompt, both_sides in rounds.items()
        ]
    return found


def workloads_of(recipe: Recipe) -> dict[str, str]:
    """Prompt id -> workload, of validation and held-out prompts."""
    splits = (read_prompts(recipe.prompts_dir, split) for split in ("validation", "heldout"))
    return {prompt.id: prompt.category for prompts in splits for prompt in prompts}


def heldout_states(recipe: Recipe, prompts: int, temperature: float = 0.0, responses: int = 1) -> Path:
    """The target's responses to held-out prompts with the states behind them, in results/NAME/explain."""
    spec, workload = load_target_spec(recipe.target_path, recipe.target.revision), load_workload(recipe)
    directory = recipe.results_dir / (f"explain-t{temperature:g}" if temperature else "explain")
    identity = {"prompts": workload.digest, "number": prompts, "max_tokens": recipe.eval.max_tokens}
    identity["continued"] = recipe.eval.num_draft_tokens  # tokens that would follow a response
    identity |= {"temperature": temperature, "seed": SEED, "responses": responses} if temperature else {}
    if begin(directory, "states", identity | states_identity(recipe, spec), alone=True):
        return directory
    chosen = sorted(workload.prompts, key=lambda prompt: prompt.id)[:prompts]  # ids are hashes: a draw over workloads
    chosen = [replace(p, id=f"{p.id}{_AGAIN}{i}" if i else p.id) for i in range(responses) for p in chosen]
    with offline_engine(recipe, seeded=temperature > 0) as llm:
        texts = respond(recipe, Engine(llm), chosen, temperature)
    job = ShardJob(shard_path(directory, 0), texts)
    with backend(recipe, spec) as harvester, progress_bar(job.size, "harvesting", "seq") as bar:
        harvester.make(job, bar)
        harvester.finish()
    finish(directory, {"sequences": len(texts)})
    return directory


def respond(recipe: Recipe, engine: Engine, prompts: list[EvalPrompt], temperature: float) -> list[Response]:
    """Responses, and what would follow each: vLLM counts accepted tokens before it trims at the stop."""
    K, count = recipe.eval.num_draft_tokens, len(prompts)
    seeds = range(SEED, SEED + count)
    asked = [(p.prompt_ids, recipe.eval.max_tokens, temperature, s) for p, s in zip(prompts, seeds, strict=True)]
    first = engine.generate([GenerationRequest(*one) for one in asked])
    texts = [[*p.prompt_ids, *one.token_ids] for p, one in zip(prompts, first, strict=True)]
    # With other random numbers than the response's own first tokens.
    more = [GenerationRequest(text, K, temperature, s + count, True) for text, s in zip(texts, seeds, strict=True)]
    return [
        Response(
            p.id, p.category, p.prompt_ids, one.token_ids, more.token_ids, "", one.finish_reason, temperature,
            recipe.eval.reasoning_effort, seed,
        )
        for p, one, more, seed in zip(prompts, first, engine.generate(more), seeds, strict=True)
    ]  # fmt: skip


if __name__ == "__main__":
    run_recipe(main)
