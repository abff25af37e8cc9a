"""States captured while the target answers: where they wait, and how they get into the store.

A store is made from finished responses, and its manifest names them; while answers are being given there are none yet.
So the shards of a part wait in a folder of that part, and move into the store once the responses are finished. A part
is written before its shards. Whatever a kill leaves without states is found missing by the harvest, which reads those
texts once more.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from drafthead.config import Recipe
from drafthead.data.responses import Response, read_parts
from drafthead.data.shard import open_checked
from drafthead.generation.states.shard_jobs import ShardJob, cut
from drafthead.generation.states.state_stores import captured
from drafthead.provenance import begin
from drafthead.target.pieces import TargetSpec

KIND = "captured states"


def waiting_room(recipe: Recipe, split: str) -> Path:
    """Where the shards of a split wait."""
    return recipe.directory("data", recipe.name, "one-pass", split)


def claim_waiting_room(recipe: Recipe, spec: TargetSpec, split: str) -> None:
    """See that what waits there was captured in the same way, or that nothing does.

    Raises:
        ArtefactError: it was captured from another target, at other aux layers or in another format.
    """
    begin(waiting_room(recipe, split), KIND, captured(recipe, spec))


def shards_of_part(recipe: Recipe, split: str, part: str, responses: Sequence[Response]) -> list[ShardJob]:
    """The shards of a part (named without suffix), in the room where they wait."""
    return cut(waiting_room(recipe, split) / part, [responses], recipe.states.sequences_per_shard)


def forget_part(recipe: Recipe, split: str, part: str) -> None:
    """Remove what waits of a part that is about to be answered anew."""
    shutil.rmtree(waiting_room(recipe, split) / part, ignore_errors=True)


def move_in(recipe: Recipe, spec: TargetSpec, split: str, jobs: Sequence[ShardJob]) -> None:
    """Give the shards that wait their names in the store; several processes may do it at the same time.

    Args:
        recipe: with states.one_pass.
        spec: of the target.
        split: whose responses are finished.
        jobs: the shards of its store.

    Raises:
        ArtefactError: what waits was captured otherwise, or is damaged.
    """
    room = waiting_room(recipe, split)
    if not room.exists():
        return
    claim_waiting_room(recipe, spec, split)
    parts = read_parts(recipe.responses_dir(split))
    waiting = [job for name, part in parts.items() for job in shards_of_part(recipe, split, name, part)]
    for source, job in zip(waiting, jobs, strict=True):
        try:
            if source.path.exists() and not job.path.exists() and _holds_the_text(source):
                os.replace(source.path, job.path)
        except FileNotFoundError:
            continue  # another process moved it
    shutil.rmtree(room, ignore_errors=True)


def _holds_the_text(job: ShardJob) -> bool:
    """Whether a shard was captured over these very answers, and not over earlier ones to the same prompts."""
    shard = open_checked(job.path, [response.id for response in job.responses])
    return all(shard.rows(i, "input_ids").tolist() == text for i, text in enumerate(job.texts()))
