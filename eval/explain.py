"""Why is the served acceptance lower than the predicted one?

    python eval/explain.py [RECIPE] [--head DIR] [--prompts N] [section.key=value ...]

Compares the served head with the checkpoint it comes from and with the target. Then validation and held-out prompts are
both predicted, by replay, and served, by workload and position: what differs on the same prompts is serving, what
differs between the two predictions is the prompts.
"""

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
from drafthead.exporting.check import choose_documents, head_differences, replayed_rounds, serve_documents
from drafthead.generation.harvest import backend
from drafthead.generation.shards import ShardJob, states_identity
from drafthead.progress import progress_bar
from drafthead.target.spec import load_target_spec

OPTIONS = (
    ("--head", {"type": Path, "metavar": "DIR", "help": "the served head (default: the recipe's)"}),
    ("--prompts", {"type": int, "default": 64, "help": "at most, of each split (default: 64)"}),
)


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
    print_table(gap_table(rows))
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


def workloads_of(recipe: Recipe) -> dict[str, str]:
    """Prompt id -> workload, of validation and held-out prompts."""
    splits = (read_prompts(recipe.prompts_dir, split) for split in ("validation", "heldout"))
    return {prompt.id: prompt.category for prompts in splits for prompt in prompts}


def heldout_states(recipe: Recipe, prompts: int) -> Path:
    """The target's responses to held-out prompts with the states behind them, in results/NAME/explain."""
    spec, workload = load_target_spec(recipe.target_path, recipe.target.revision), load_workload(recipe)
    directory = recipe.results_dir / "explain"
    identity = {"prompts": workload.digest, "number": prompts, "max_tokens": recipe.eval.max_tokens}
    identity["continued"] = recipe.eval.num_draft_tokens  # tokens that would follow a response
    if begin(directory, "states", identity | states_identity(recipe, spec), alone=True):
        return directory
    chosen = sorted(workload.prompts, key=lambda prompt: prompt.id)[:prompts]  # ids are hashes: a draw over workloads
    with offline_engine(recipe) as llm:
        texts = respond(recipe, Engine(llm), chosen)
    job = ShardJob(shard_path(directory, 0), texts)
    with backend(recipe, spec) as harvester, progress_bar(job.size, "harvesting", "seq") as bar:
        harvester.make(job, bar)
        harvester.finish()
    finish(directory, {"sequences": len(texts)})
    return directory


def respond(recipe: Recipe, engine: Engine, prompts: list[EvalPrompt]) -> list[Response]:
    """Greedy responses, and what would follow each: vLLM counts accepted tokens before it trims at the stop."""
    first = engine.generate([GenerationRequest(p.prompt_ids, recipe.eval.max_tokens, 0.0, None) for p in prompts])
    texts = [[*p.prompt_ids, *one.token_ids] for p, one in zip(prompts, first, strict=True)]
    more = [GenerationRequest(text, recipe.eval.num_draft_tokens, 0.0, None, ignore_stop=True) for text in texts]
    return [
        Response(
            p.id, p.category, p.prompt_ids, one.token_ids, more.token_ids, "", one.finish_reason, 0.0,
            recipe.eval.reasoning_effort, SEED,
        )
        for p, one, more in zip(prompts, first, engine.generate(more), strict=True)
    ]  # fmt: skip


if __name__ == "__main__":
    run_recipe(main)
