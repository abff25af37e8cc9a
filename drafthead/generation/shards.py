"""The unit of work of a harvest: a shard, which is a fixed slice of the responses.

A shard is computed alone, so that its bytes depend on its inputs and not on what ran before it or on which worker ran
it. Resuming, retrying and spreading over processes and nodes are therefore the same thing: make the shards that are
missing. That gives up prefix caching between shards and a full batch at each shard's end.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from drafthead.config import Recipe
from drafthead.data.responses import Response, ResponseRows, loss_mask, read_parts
from drafthead.data.shard import open_checked, shard_path
from drafthead.engine.running import unwritten
from drafthead.engine.shard_writer import SequenceSpec
from drafthead.progress import progress_bar
from drafthead.target.spec import TargetSpec, target_identity

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardJob:
    """A unit of work.

    Attributes:
        path: path of the shard.
        responses: responses of the shard, in order.
        learned_share: share of each prompt, counted from its end, that the head learns from too.
    """

    path: Path
    responses: Sequence[Response] | ResponseRows
    learned_share: float = 0

    @property
    def size(self) -> int:
        return len(self.responses)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(r.prompt_ids) + len(r.response_ids) + len(r.continuation_ids) for r in self.responses]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def loss_tokens(self) -> int:
        """Tokens that are learned."""
        return sum(len(spec.loss_mask) - spec.loss_mask.count(0) for spec in self.sequences())

    def sequences(self) -> list[SequenceSpec]:
        """The sequences of the shard, in order."""
        sequences = []
        for r in self.responses:
            pieces = r.prompt_ids, r.response_ids, r.continuation_ids
            mask = loss_mask(pieces, r.turn, self.learned_share)
            sequences.append(SequenceSpec(r.id, [*chain(*pieces)], mask.tobytes()))
        return sequences


def list_jobs(recipe: Recipe, split: str) -> list[ShardJob]:
    """The shards of a split, in order."""
    parts = read_parts(recipe.responses_dir(split)).values()
    rows = ResponseRows([piece for part in parts for piece in part.pieces])
    size, learned = recipe.states.sequences_per_shard, recipe.states.learned_share(split)
    return [
        ShardJob(shard_path(recipe.states_dir(split), i), rows[start : start + size], learned)
        for i, start in enumerate(range(0, len(rows), size))
    ]


def to_do(jobs: Sequence[ShardJob]) -> list[ShardJob]:
    """The jobs whose shards do not exist; those that do are read and checked, several at a time.

    Raises:
        ArtifactError: a shard is damaged or holds other sequences; that is an error, not work to skip.
    """
    if len(missing := unwritten(jobs)) == len(jobs):
        return missing
    with ThreadPoolExecutor() as pool:
        are_whole = progress_bar(len(jobs), "checking", "shard", pool.map(_is_whole, jobs))
        return [job for job, whole in zip(jobs, are_whole, strict=True) if not whole]


def _is_whole(job: ShardJob) -> bool:
    try:
        open_checked(job.path, [response.id for response in job.responses]).check()
    except FileNotFoundError:
        return False
    return True


def log_rate(done: str, tokens: int, started: float) -> None:
    """Of a stage that began at `started`, by time.monotonic()."""
    rate = tokens / (time.monotonic() - started)
    logger.info("%s %s tokens at %s tokens/s, start included", done, f"{tokens:,}", f"{rate:,.0f}")


def states_identity(recipe: Recipe, spec: TargetSpec) -> dict[str, Any]:
    """What states are made of, but for the responses: a part of the identity of whatever holds them."""
    return {
        "target": target_identity(recipe, spec),
        **recipe.target.model_dump(include={"dtype", "aux_layer_ids"}),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        **recipe.states.model_dump(include={"backend", "format", "sequences_per_shard", "prompt_loss"}),
    }
