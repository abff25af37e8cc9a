"""Run the target over its own text and store what it thought at every position.

A sequence is prompt, response and continuation; the loss mask is 1 on the response only. A shard is the unit of
work: a fixed slice of the responses, computed alone and skipped when present, so that its bytes depend on its
inputs and not on what ran before it. That gives up prefix caching between shards and a full batch at each shard's
end. Generating and harvesting in one pass would save a prefill, but mixes states of the decode and prefill kernels.
With states.spool_shards the training split becomes a spool that training empties meanwhile (see generation.fill).

Shapes: T tokens, L blocks of the target.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.responses import Response, read_responses
from drafthead.data.shard import LAYOUT
from drafthead.data.spool import KIND as SPOOL
from drafthead.data.spool import terms
from drafthead.data.store import KIND, Shard, open_checked, shard_path
from drafthead.models.target import TargetSpec, check_tap_ids, load_target_spec, target_identity
from drafthead.progress import progress_bar
from drafthead.provenance import ArtefactError, begin, finish, reference, require
from drafthead.serving.shard_writer import ShardSlot

SPLITS = ("train", "validation")
_MAKE_RESPONSES = "python data_gen/regenerate.py RECIPE"
_MIN_AGREEMENT = 0.9  # of the T = 0 text; what is missing are near ties between two tokens


@dataclass(frozen=True)
class ShardJob:
    """A unit of work.

    Attributes:
        directory: of the store.
        index: of the shard.
        responses: its sequences, in order.
    """

    directory: Path
    index: int
    responses: Sequence[Response]

    @property
    def path(self) -> Path:
        return shard_path(self.directory, self.index)

    def slots(self) -> list[ShardSlot]:
        """Where each sequence goes."""
        return [
            ShardSlot(
                str(self.directory), self.index, i, len(self.responses), r.id, len(r.prompt_ids), len(r.response_ids)
            )
            for i, r in enumerate(self.responses)
        ]

    def texts(self) -> list[list[int]]:
        """Token ids of each sequence."""
        return [[*r.prompt_ids, *r.response_ids, *r.continuation_ids] for r in self.responses]


class Harvester(Protocol):
    """A running backend."""

    def harvest(self, job: ShardJob, bar: tqdm) -> None:
        """Compute and hand over the shard's rows; raises what went wrong."""

    def finish(self) -> None:
        """Wait until every shard is on disk; raises what went wrong."""


def harvest(recipe: Recipe) -> None:
    """Make the states of both splits; finished shards are kept, and no model is loaded when all are.

    Raises:
        ArtefactError: responses are missing or come from another target, or a directory holds something else.
        FileNotFoundError: the target is missing.
        ValueError: a tap lies beyond the target, a text is too long, or a shard could not be written.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision, recipe.target.trust_remote_code)
    check_tap_ids(spec, recipe.target.tap_ids)
    unfinished = [split for split in SPLITS if not claim(recipe, spec, split)]
    if recipe.states.spool_shards is not None:
        from drafthead.generation.fill import harvest_online

        harvest_online(recipe, spec, validation="validation" in unfinished)
        return
    jobs = {split: list_jobs(recipe, split) for split in unfinished}
    missing = [job for split in unfinished for job in jobs[split] if not present(job)]
    if missing:
        started = time.monotonic()
        run_jobs(recipe, spec, missing)
        tokens = sum(len(text) for job in missing for text in job.texts())
        print(f"harvested {tokens:,} tokens at {tokens / (time.monotonic() - started):,.0f} tokens/s, start included")
    for split in unfinished:
        finish_split(recipe, jobs[split], split)


def claim(recipe: Recipe, spec: TargetSpec, split: str) -> bool:
    """Check a split's responses and claim the directory of its states; True when they are complete.

    Raises:
        ArtefactError: responses are missing or come from another target, or the directory holds something else.
    """
    responses = require(recipe.responses_dir(split), RESPONSES, _MAKE_RESPONSES)
    check_same_target(recipe, spec, responses, split)
    identity = _identity(recipe, spec, responses)
    if split == "train" and recipe.states.spool_shards is not None:
        return begin(recipe.states_dir(split), SPOOL, identity | terms(recipe))
    return begin(recipe.states_dir(split), KIND, identity)


def list_jobs(recipe: Recipe, split: str) -> list[ShardJob]:
    """The shards of a split, in order.

    Raises:
        ValueError: a text does not fit the engine.
    """
    responses, size = read_responses(recipe.responses_dir(split)), recipe.states.sequences_per_shard
    limit = recipe.engine.max_model_len - 1  # the engine generates one token after the text
    for response in responses:
        length = len(response.prompt_ids) + len(response.response_ids) + len(response.continuation_ids)
        if length > limit:
            raise ValueError(
                f"{split} sequence {response.id} has {length} tokens, but engine.max_model_len "
                f"{recipe.engine.max_model_len} allows {limit}; set it to {length + 1} or more"
            )
    directory = recipe.states_dir(split)
    return [
        ShardJob(directory, i, responses[start : start + size])
        for i, start in enumerate(range(0, len(responses), size))
    ]


def run_jobs(recipe: Recipe, spec: TargetSpec, jobs: Sequence[ShardJob]) -> None:
    """Harvest shards with one start of the recipe's backend."""
    with backend(recipe, spec) as harvester:
        harvest_jobs(harvester, jobs)


def harvest_jobs(harvester: Harvester, jobs: Sequence[ShardJob]) -> None:
    """Harvest shards and see that they are on disk."""
    with progress_bar(sum(len(job.responses) for job in jobs), "harvesting", "seq") as bar:
        for job in jobs:
            harvester.harvest(job, bar)
        harvester.finish()
    for job in jobs:
        if not job.path.exists():
            raise ValueError(f"the engine returned but {job.path} was not written; run the same command again")


def check_same_target(recipe: Recipe, spec: TargetSpec, responses: dict[str, Any], split: str) -> None:
    """Refuse to harvest one target's states over another target's text.

    Raises:
        ArtefactError: the responses were made by a target with another fingerprint.
    """
    made_by = responses["identity"]["target"]
    if made_by["fingerprint"] != spec.fingerprint:
        raise ArtefactError(
            f"{recipe.responses_dir(split)} was generated by {made_by['path']} "
            f"(fingerprint {made_by['fingerprint'][:12]}), but target.path {recipe.target.path} has fingerprint "
            f"{spec.fingerprint[:12]}: the text would not be the target's own; delete the responses "
            f"and run: {_MAKE_RESPONSES}"
        )


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


def backend(recipe: Recipe, spec: TargetSpec) -> AbstractContextManager[Harvester]:
    """The recipe's way to run the target, started when the block is entered."""
    if recipe.states.backend == "transformers":
        from drafthead.generation.harvest_transformers import transformers_harvester

        return transformers_harvester(recipe, spec)
    return _vllm_harvester(recipe, spec)


class _VllmHarvester:
    def __init__(self, llm: Any):
        self._llm = llm

    def harvest(self, job: ShardJob, bar: tqdm) -> None:
        from vllm import SamplingParams

        from drafthead.serving.engine import generate

        params = [
            SamplingParams(
                temperature=0.0, max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": slot.to_params()}
            )
            for slot in job.slots()
        ]
        generate(self._llm, job.texts(), params, bar)
        self._check(wait=False)

    def finish(self) -> None:
        self._check(wait=True)

    def _check(self, wait: bool) -> None:
        for error in self._llm.collective_rpc("harvest_error", args=(wait,)):
            if error:
                raise ValueError(f"a shard could not be written: {error}")


@contextmanager
def _vllm_harvester(recipe: Recipe, spec: TargetSpec) -> Iterator[Harvester]:
    from drafthead.serving.engine import import_vllm, offline_engine

    import_vllm()  # before the connector, which is made of vLLM's classes
    from drafthead.serving.connector import harvest_engine_options

    target = recipe.target
    options = harvest_engine_options(spec, target.revision, target.tap_ids, target.dtype, recipe.states.format)
    with offline_engine(recipe, prefix_caching=False, log_stats=False, **options) as llm:
        yield _VllmHarvester(llm)


def present(job: ShardJob) -> bool:
    """Whether the shard is there; a shard of other sequences or a damaged one is an error, not work to skip."""
    try:
        open_checked(job.path, [response.id for response in job.responses])
    except FileNotFoundError:
        return False
    return True


def _identity(recipe: Recipe, spec: TargetSpec, responses: dict[str, Any]) -> dict[str, Any]:
    return {
        "responses": reference(responses),
        "target": target_identity(recipe, spec),
        "dtype": recipe.target.dtype,
        "tap_ids": list(recipe.target.tap_ids),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "backend": recipe.states.backend,
        "format": recipe.states.format,
        "layout": LAYOUT,
        "sequences_per_shard": recipe.states.sequences_per_shard,
    }


def finish_split(recipe: Recipe, jobs: Sequence[ShardJob], split: str) -> None:
    """Check a whole store and write its manifest.

    Raises:
        ArtefactError: the states do not lead to the target's own text.
    """
    directory = recipe.states_dir(split)
    for leftover in directory.glob(".shard-*.tmp"):  # of a killed run; every shard is written by now
        leftover.unlink()
    tokens = sum(len(text) for job in jobs for text in job.texts())
    size = sum(job.path.stat().st_size for job in jobs)
    agreement = _argmax_agreement(jobs)
    if agreement is not None and agreement < _MIN_AGREEMENT:
        raise ArtefactError(
            f"the states in {directory} do not lead to the target's own text: its argmax is the next token at only "
            f"{agreement:.1%} of the T = 0 positions; the engine read another checkpoint or captured other rows. "
            f"Delete {directory} and compare with states.backend=transformers"
        )
    counts = {
        "sequences": sum(len(job.responses) for job in jobs),
        "tokens": tokens,
        "loss_tokens": sum(len(r.response_ids) for job in jobs for r in job.responses),
        "shards": len(jobs),
        "bytes_per_token": size / tokens,
        "argmax_agreement": agreement,
    }
    finish(directory, counts)


def _argmax_agreement(jobs: Sequence[ShardJob]) -> float | None:
    """Share of greedily generated tokens that the harvested states predict; None where nothing was greedy.

    Row t predicts token t + 1, so of a text  p0 p1 r2 r3  (p prompt, r response) rows 1 and 2 are compared.
    """
    agreed = total = 0
    for job in jobs:
        shard = Shard(job.path)
        for i, response in enumerate(job.responses):
            if response.temperature == 0:
                sequence = shard[i]
                said = sequence.input_ids[sequence.first_row + 1 :]
                wanted = sequence.loss_mask[sequence.first_row + 1 :].bool()
                agreed += int((sequence.argmax[:-1] == said)[wanted].sum())
                total += int(wanted.sum())
    return agreed / total if total else None
