"""Run the target over its own text and store what it thought at every position.

A sequence is prompt, response and continuation; the loss mask is 1 on the response only. The work is cut into shards
(generation.shard_jobs), which one engine makes in this process, many on a Ray cluster (generation.cluster),
or independent processes that take a share each. With states.one_pass the shards are there already, captured while the
target answered (generation.one_pass), and only what is missing is made. With states.spool_shards the training split
becomes a spool that training empties meanwhile (generation.fill).
"""

import time
from collections.abc import Sequence

from drafthead.config import Recipe
from drafthead.data.spool import KIND as SPOOL
from drafthead.data.store import KIND
from drafthead.generation.running import Runner, run_here, unwritten
from drafthead.generation.states.harvesters import harvesting
from drafthead.generation.states.one_pass import move_in
from drafthead.generation.states.shard_jobs import WHOLE, ShardJob, Share, list_jobs, to_do
from drafthead.generation.states.state_stores import claim, finish_split
from drafthead.provenance import require
from drafthead.target.pieces import check_aux_layer_ids, load_target_spec

SPLITS = ("train", "validation")


def harvest(recipe: Recipe, share: Share = WHOLE, run: Runner = run_here) -> bool:
    """Make the states of both splits; finished shards are kept, and no model is loaded when all are.

    Args:
        recipe: what to harvest.
        share: make these shards only. Whoever finds all shards of a split there, finishes it.
        run: makes the shards.

    Returns:
        Whether both splits are finished; False when shards of other shares are missing.

    Raises:
        ArtefactError: responses are missing or come from another target, or a directory holds something else.
        FileNotFoundError: the target is missing.
        ValueError: an aux layer lies beyond the target, a text is too long, or a shard could not be written.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    if recipe.states.spool_shards is not None and (run is not run_here or share != WHOLE):
        raise ValueError(
            f"states.spool_shards {recipe.states.spool_shards}: one engine fills a spool, in the order in which "
            "training reads it; leave out --cluster and --shards, or harvest the whole store without a spool"
        )
    unfinished = [split for split in SPLITS if not claim(recipe, spec, split)]
    if recipe.states.spool_shards is not None:
        from drafthead.generation.states.fill import harvest_online

        harvest_online(recipe, spec, validation="validation" in unfinished)
        return True
    jobs = {split: list_jobs(recipe, split) for split in unfinished}
    if recipe.states.one_pass:
        for split in unfinished:
            move_in(recipe, spec, split, jobs[split])
    missing = to_do([job for split in unfinished for job in jobs[split] if job in share])
    if missing:
        started = time.monotonic()
        run(recipe, harvesting(recipe, spec), missing)
        tokens = sum(len(text) for job in missing for text in job.texts())
        print(f"harvested {tokens:,} tokens at {tokens / (time.monotonic() - started):,.0f} tokens/s, start included")
    finished = [_finish_if_whole(recipe, jobs[split], split) for split in unfinished]
    return all(finished)


def _finish_if_whole(recipe: Recipe, jobs: Sequence[ShardJob], split: str) -> bool:
    if lacking := unwritten(jobs):
        print(
            f"{split:<10} {len(jobs) - len(lacking)} of {len(jobs)} shards are there; whoever writes the last one "
            "finishes the store, or the command without --shards"
        )
        return False
    finish_split(recipe, jobs, split)
    return True


def print_states(recipe: Recipe) -> None:
    """One line per split: sequences, tokens, bytes per token in the recipe's format."""
    for split in SPLITS:
        kind = SPOOL if split == "train" and recipe.states.spool_shards is not None else KIND
        counts = require(recipe.states_dir(split), kind, "python data_gen/harvest.py RECIPE")["counts"]
        if kind == SPOOL:
            print(f"{split:<10} {counts['shards']} shards ({counts['epochs']} epochs) passed through the spool")
            continue
        agreement = counts["argmax_agreement"]
        check = "" if agreement is None else f", target's argmax is its own text at {agreement:.1%} of positions"
        print(
            f"{split:<10} {counts['sequences']:,} sequences, {counts['tokens']:,} tokens "
            f"({counts['loss_tokens']:,} in the loss), {counts['shards']} shards, "
            f"{counts['bytes_per_token']:,.0f} bytes per token in {recipe.states.format}{check}"
        )
