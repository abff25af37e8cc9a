"""Run the target over its own text and store its hidden states at every position.

A sequence is prompt, response and continuation; the loss mask marks the response, and the prompt where it is learned
(states.prompt_loss). The work is cut into shards (generation.shards), which one engine makes in this process, or many
on a Ray cluster (engine.cluster).

Online mode (states.spool_shards): the validation split is harvested into an ordinary store, then the spool of the
training split is kept full until training has all it needs. Shards follow in the order in which training reads them,
through all epochs. Where nothing fits, the harvester waits for the trainer; where the trainer is ahead, it waits for
the harvester. What to write next is read off the spool each time, so a restart needs no state of its own, and several
harvesters may fill one spool, on one machine or on many; one of them makes the validation split, the others wait for
it. Given up: the engine holds its memory while it waits, so harvesters and trainer want devices of their own.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from drafthead import locks
from drafthead.artifacts import IDENTITY, MANIFEST, ArtifactError, begin, finish, read_json, reference, require
from drafthead.config import Recipe
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.responses import SPLITS
from drafthead.data.shard import Shard
from drafthead.data.spool import KIND as SPOOL
from drafthead.data.spool import Spool, open_spool, terms
from drafthead.data.store import KIND, verify_shard, verify_store
from drafthead.engine.generate import capturing_engine
from drafthead.engine.running import Runner, Task, Worker, run_here
from drafthead.engine.shard_writer import ShardWriter
from drafthead.files import reading_external
from drafthead.generation.shards import ShardJob, list_jobs, log_rate, states_identity, to_do
from drafthead.progress import progress_bar, wait_until
from drafthead.target.files import AGAIN, OTHER, pinned_revision
from drafthead.target.pieces import TargetHead, compute_dtype
from drafthead.target.spec import TargetSpec, captured_ids, recipe_spec, target_names

logger = logging.getLogger(__name__)

_MAKE_RESPONSES = "python data_gen/regenerate.py RECIPE"
_MIN_AGREEMENT = 0.9  # of the T = 0 text; what is missing are near ties between two tokens


def harvest(recipe: Recipe, run: Runner = run_here) -> None:
    """Make the states of both splits; finished shards are kept, and no model is loaded when all are.

    Args:
        recipe: recipe; its target, engine and states sections are read.
        run: runs the jobs that make the shards.

    Raises:
        ArtifactError: responses are missing or come from another target, or a directory holds something else.
        FileNotFoundError: the target is missing.
        ValueError: an aux layer lies beyond the target, a sequence is too long, or a shard could not be written.
    """
    spec, online = recipe_spec(recipe), recipe.states.spool_shards is not None
    if online and run is not run_here:
        raise ValueError(
            f"states.spool_shards {recipe.states.spool_shards}: each command is one engine of those that fill a spool; "
            "leave out --cluster and --workers, and start the command once for each engine, with its own GPUs"
        )
    if online:
        directory = recipe.states_dir("validation")
        wait_until(partial(_ours, directory), f"another harvester of the spool, which makes {directory}")
    unfinished = [split for split in SPLITS if not claim(recipe, spec, split)]
    jobs = {split: list_jobs(recipe, split) for split in unfinished if split == "validation" or not online}
    if missing := to_do([job for split in jobs for job in jobs[split]]):
        _check_lengths(recipe, missing)
        started = time.monotonic()
        gpus = recipe.engine.tensor_parallel_size
        run(Task(partial(backend, recipe, spec), gpus, "harvesting", "seq"), missing)
        log_rate("harvested", sum(job.num_tokens for job in missing), started)
    for split in jobs:
        _finish(jobs[split])
    if online:
        _harvest_online(recipe, spec)


def _ours(directory: Path) -> bool:
    """Acquire the lock of a directory; True if this process owns it. A process that does not waits for the files."""
    try:
        locks.acquire(directory, timeout_s=0)
    except locks.InUseError:
        return locks.holds(directory)
    return True


def claim(recipe: Recipe, spec: TargetSpec, split: str) -> bool:
    """Check a split's responses and claim the directory of its states; True when they are complete.

    Raises:
        ArtifactError: responses are missing or come from another target, or the directory holds something else.
    """
    responses = require(recipe.responses_dir(split), RESPONSES, _MAKE_RESPONSES, every_byte=True)
    made_by, target = target_names(responses["identity"]["target"], recipe, spec)
    if made_by != target:
        raise ArtifactError(
            f"{recipe.responses_dir(split)} was generated by {made_by}, but target.path is {target}: the text would "
            f"not be the target's own; delete the responses and run: {_MAKE_RESPONSES}"
        )
    identity = {"responses": reference(responses), **states_identity(recipe, spec)}
    if split == "train" and recipe.states.spool_shards is not None:
        return begin(recipe.states_dir(split), SPOOL, identity | terms(recipe))
    return begin(recipe.states_dir(split), KIND, identity)


def _check_lengths(recipe: Recipe, jobs: Sequence[ShardJob]) -> None:
    """Before an engine starts: vLLM reads a sequence as a prompt and wants room for one token after it."""
    longest = max(length for job in jobs for length in job.lengths)
    if recipe.states.backend == "vllm" and longest >= recipe.engine.max_model_len:
        raise ValueError(
            f"the longest response has {longest} tokens with its prompt, engine.max_model_len is "
            f"{recipe.engine.max_model_len}; set it to {longest + 1} or more"
        )


def _finish(jobs: Sequence[ShardJob]) -> None:
    """Check a store and write its manifest.

    Raises:
        ArtifactError: the states do not lead to the target's own text.
    """
    directory, counts, agreement = jobs[0].path.parent, _counts(jobs), argmax_agreement(jobs)
    if agreement is not None and agreement < _MIN_AGREEMENT:
        raise ArtifactError(
            f"the states in {directory} do not lead to the target's own text: its argmax is the next token at only "
            f"{agreement:.1%} of the T = 0 positions; the engine read another checkpoint or captured other rows. "
            f"Delete {directory} and compare with states.backend=transformers"
        )
    density = sum(job.path.stat().st_size for job in jobs) / counts["tokens"]
    finish(directory, counts | {"shards": len(jobs), "bytes_per_token": density, "argmax_agreement": agreement})


def _counts(jobs: Sequence[ShardJob]) -> dict[str, int]:
    return {
        "sequences": sum(job.size for job in jobs),
        "tokens": sum(job.num_tokens for job in jobs),
        "loss_tokens": sum(job.loss_tokens for job in jobs),
    }


def argmax_agreement(jobs: Sequence[ShardJob]) -> float | None:
    """Share of greedily generated tokens that the harvested states predict; None where nothing was greedy.

    Row t predicts token t + 1, so of a sequence  p0 p1 r2 r3  (p prompt, r response) rows 1 and 2 are compared.
    """
    agreed = total = 0
    for job in jobs:
        shard = Shard(job.path)
        for i, response in enumerate(job.responses):
            if response.temperature == 0:  # the states themselves, nearly all of a shard's bytes, are not read
                ids, mask, argmax = (shard.rows(i, name) for name in ("input_ids", "loss_mask", "argmax"))
                first = len(ids) - len(argmax) + 1  # token that the first stored row predicts
                in_loss = mask[first:] == 1  # learned prompts were not generated by a model
                agreed += int((argmax[:-1] == ids[first:])[in_loss].sum())
                total += int(in_loss.sum())
    return agreed / total if total else None


# ---- Online mode ----


def _harvest_online(recipe: Recipe, spec: TargetSpec) -> None:
    """Fill the spool of the training split, alone or beside other harvesters, until nothing is left to write.

    Raises:
        ArtifactError: a shard in the spool is damaged or holds other sequences.
    """
    jobs = list_jobs(recipe, "train")
    spool = open_spool(recipe, sum(job.size for job in jobs))
    to_do([_job(spool, jobs, index) for index in sorted(spool.present())])  # raises if one is damaged
    spool.in_work()  # claims of killed harvesters go, where nothing is left to be claimed too
    if spool.demand() != spool.total:
        _check_lengths(recipe, jobs)
        (spool.directory / MANIFEST).unlink(missing_ok=True)
        with backend(recipe, spec) as harvester:
            fill(harvester, spool, jobs)
    if spool.first_needed() == spool.total:
        spool.release(spool.total)  # training ended while the last shard was on its way
    if not (spool.directory / MANIFEST).exists():
        finish(spool.directory, _counts(jobs) | {"shards": spool.total, "epochs": spool.epochs}, lasting=False)


def fill(harvester: Worker, spool: Spool, jobs: Sequence[ShardJob]) -> None:
    """Write what the spool demands and no other harvester writes, until it demands nothing more.

    While one shard goes to disk the next is computed, if the spool has room for both.

    Args:
        harvester: worker that makes shards.
        spool: spool to fill.
        jobs: jobs for the shards of one epoch.
    """
    began, waited = time.monotonic(), 0.0
    claimed: set[int] = set()
    index = spool.claim()
    done = sum(_job(spool, jobs, index).size for index in {*range(spool.first_needed()), *spool.present()})
    wait = (
        f"training to use up a shard of {spool.directory}, which has its {spool.capacity}, or for other harvesters; if "
        "training is not running: accelerate launch train/eagle3.py RECIPE"
    )

    def release(landed: AbstractSet[int]) -> None:
        for index in claimed & landed:
            claimed.remove(index)
            spool.release_claim(index)

    def free() -> bool:
        nonlocal index
        index = spool.claim(claimed)
        return index is not None

    with progress_bar(spool.epochs * sum(job.size for job in jobs), "harvesting", "seq", initial=done) as bar:
        while index != spool.total:
            if index is None:
                harvester.finish()
                release(claimed)
                waited += wait_until(free, wait)
            else:
                claimed.add(index)
                harvester.make(_job(spool, jobs, index), bar)
                release(spool.present())
                index = spool.claim(claimed)
        harvester.finish()
        release(claimed)
    took = time.monotonic() - began
    logger.info("the spool was filled in %.0f s, %.0f s of them spent waiting for training to make room", took, waited)


def _job(spool: Spool, jobs: Sequence[ShardJob], index: int) -> ShardJob:
    """The work behind a spool index."""
    return replace(jobs[index % len(jobs)], path=spool.path(index))


# ---- Ways to run the target ----


def backend(recipe: Recipe, spec: TargetSpec) -> AbstractContextManager[Worker]:
    """The recipe's way to run the target, started when the block is entered."""
    if recipe.states.backend == "vllm":
        return capturing_engine(recipe, spec)
    return transformers_harvester(recipe, spec)


@contextmanager
def transformers_harvester(recipe: Recipe, spec: TargetSpec) -> Iterator[Any]:
    """A worker of `drafthead.engine.running` that needs no vLLM, and a cross-check of the connector.

    One sequence at a time through the reference model, in eager order. It gives up speed (no paging, no batching, no
    tensor parallelism) and the guarantee that states come from the engine that will serve the head.
    """
    from transformers import AutoModelForCausalLM

    target, device = recipe.target, "cuda" if torch.cuda.is_available() else "cpu"
    with reading_external(f"the target {target.path}", AGAIN, unsupported=OTHER):
        model = AutoModelForCausalLM.from_pretrained(
            recipe.target_path,
            revision=pinned_revision(recipe.target_path, target.revision),
            dtype=compute_dtype(spec, target.dtype),
            trust_remote_code=target.trust_remote_code,
        )
    head = TargetHead.load(recipe.target_path, target.revision, target.dtype, device)
    writer = ShardWriter(target.aux_layer_ids, spec.num_layers, head, recipe.states.format)
    boundaries = captured_ids(spec, target.aux_layer_ids)
    module = nn.Module.to(model, device).eval()

    def make(job: ShardJob, bar: tqdm) -> None:
        sequences, rows = job.sequences(), []
        for sequence in sequences:
            rows.append(capture(module, sequence.token_ids, boundaries).cpu())
            bar.update(1)
        writer.write(job.path, sequences, rows)

    try:
        yield SimpleNamespace(make=make, finish=writer.finish)
    finally:
        writer.close()


@torch.no_grad()
def capture(model: nn.Module, token_ids: list[int], boundaries: tuple[int, ...]) -> Tensor:
    """Residual stream of one sequence of T tokens at C `boundaries`, (T, C, H).

    transformers returns boundary L after the final norm, so that one is taken where it enters the norm.
    """
    entering: list[Tensor] = []
    decoder: Any = model.base_model
    hook = decoder.norm.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
    try:
        ids = torch.tensor([token_ids], device=next(model.parameters()).device)
        states = decoder(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    finally:
        hook.remove()
    residual = [*states[:-1], entering[0]]  # boundaries 0 to L
    return torch.stack([residual[boundary][0] for boundary in boundaries], dim=1)


# ---- What was made ----


def print_states(recipe: Recipe) -> None:
    """One line per split: sequences, tokens, bytes per token in the recipe's format."""
    for split in SPLITS:
        kind = SPOOL if split == "train" and recipe.states.spool_shards is not None else KIND
        counts = require(recipe.states_dir(split), kind, "python data_gen/harvest.py RECIPE")["counts"]
        if kind == SPOOL:
            print(f"{split:<10} {counts['shards']} shards ({counts['epochs']} epochs) passed through the spool")
            continue
        print(
            f"{split:<10} {counts['sequences']:,} sequences, {counts['tokens']:,} tokens "
            f"({counts['loss_tokens']:,} in the loss), {counts['shards']} shards, "
            f"{counts['bytes_per_token']:,.0f} bytes per token"
        )
        if (agreement := counts["argmax_agreement"]) is not None:
            print(f"{'':<10} the target's argmax is its own text at {agreement:.1%} of positions")


def print_verification(recipe: Recipe) -> bool:
    """`harvest.py --verify`: read both splits and print a line per split and per problem.

    Returns:
        Whether both are whole. Of a spool, whose shards come and go without checksums, those that exist are read.
    """
    whole = True
    for split in SPLITS:
        directory = recipe.states_dir(split)
        shards = sorted(directory.glob("shard-*.safetensors"))
        identity = read_json(directory / IDENTITY) if (directory / IDENTITY).exists() else {}
        if identity.get("kind") == SPOOL:
            problems, checked = [p for path in shards for p in verify_shard(path, identity)], "structure and values"
        else:
            problems, checked = verify_store(directory), "checksums, structure and values"
        outcome = f"{len(problems)} problems" if problems else "whole"
        print(f"{split:<10} {len(shards)} shards, {checked}: {outcome}")
        for problem in problems:
            print(f"{'':<10} {problem}")
        whole = whole and not problems
    return whole
