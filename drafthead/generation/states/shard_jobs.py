"""The unit of work of a harvest: a shard, which is a fixed slice of the responses.

A shard is computed alone, so that its bytes depend on its inputs and not on what ran before it or on who ran it.
Resuming, retrying and spreading over processes and nodes are therefore the same thing: make the shards that are not
there. That gives up prefix caching between shards and a full batch at each shard's end.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

from drafthead.config import Recipe
from drafthead.data.responses import Response, read_parts
from drafthead.data.store import open_checked, shard_path
from drafthead.engine.capture.shard_writer import ShardSlot
from drafthead.generation.running import unwritten
from drafthead.progress import progress


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

    @property
    def size(self) -> int:
        return len(self.responses)

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


@dataclass(frozen=True)
class Share:
    """What one of several independent processes makes of each split: every `of`-th shard, from `index` on."""

    index: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `I/N`.

        Raises:
            ValueError: it is of another form, or I is not one of 0 to N - 1.
        """
        index, _, of = text.partition("/")
        if not (index.isdecimal() and of.isdecimal()):
            raise ValueError(f"--shards {text} is not of the form I/N, such as 0/8 for the first of eight processes")
        if int(of) == 0:
            raise ValueError(f"--shards {text}: N is the number of processes, 1 or more")
        if int(index) >= int(of):
            last = int(of) - 1
            raise ValueError(
                f"--shards {text}: of {of} processes the numbers are 0 to {last}; for a Slurm array: --array=0-{last}"
            )
        return cls(int(index), int(of))

    def __contains__(self, job: ShardJob) -> bool:
        return job.index % self.of == self.index


WHOLE = Share()


def list_jobs(recipe: Recipe, split: str) -> list[ShardJob]:
    """The shards of a split, in order.

    Raises:
        ValueError: a text does not fit the engine.
    """
    parts = list(read_parts(recipe.responses_dir(split)).values())
    limit = recipe.engine.max_model_len - 1  # the engine generates one token after the text
    for response in chain.from_iterable(parts):
        length = len(response.prompt_ids) + len(response.response_ids) + len(response.continuation_ids)
        if length > limit:
            raise ValueError(
                f"{split} sequence {response.id} has {length} tokens, but engine.max_model_len "
                f"{recipe.engine.max_model_len} allows {limit}; set it to {length + 1} or more"
            )
    # Captured while they are answered, shards end where a part ends: parts are answered independently.
    groups = parts if recipe.states.one_pass else [list(chain.from_iterable(parts))]
    return cut(recipe.states_dir(split), groups, recipe.states.sequences_per_shard)


def cut(directory: Path, groups: Sequence[Sequence[Response]], size: int) -> list[ShardJob]:
    """Shards of at most `size` sequences, none of which has sequences of two groups."""
    slices = [group[start : start + size] for group in groups for start in range(0, len(group), size)]
    return [ShardJob(directory, i, responses) for i, responses in enumerate(slices)]


def to_do(jobs: Sequence[ShardJob]) -> list[ShardJob]:
    """The jobs whose shards are not there; those that are there are read and checked, several at a time.

    Raises:
        ArtefactError: a shard is damaged or holds other sequences; that is an error, not work to skip.
    """
    if len(missing := unwritten(jobs)) == len(jobs):
        return missing
    with ThreadPoolExecutor() as pool:
        found = progress(pool.map(_present, jobs), "checking", "shard", total=len(jobs))
        return [job for job, there in zip(jobs, found, strict=True) if not there]


def _present(job: ShardJob) -> bool:
    try:
        open_checked(job.path, [response.id for response in job.responses]).check()
    except FileNotFoundError:
        return False
    return True
