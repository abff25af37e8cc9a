"""The store of hidden states: a directory of shards (see data.shard), read on demand and verified as a whole.

Reading maps the files and copies only the sequence that is needed. One file per request, the usual alternative, costs
an open, a header and a rename for every few kilobytes.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from drafthead.artifacts import IDENTITY, MANIFEST, ArtifactError, read_json, require, verify_files
from drafthead.data.shard import Sequences, Shard, StateSequence, first_teacher_row

KIND = "states"


class StateStore(Sequences):
    """All sequences of a store in shard order, read on demand.

    Attributes:
        aux_layer_ids: aux layers of every sequence, ascending.
        ids: prompt id of every sequence.
        groups: sequences that may be shuffled together, as ranges that cover all of them in order.
        epoch_stride: number added to a sequence's index from one epoch to the next.

    Raises:
        ArtifactError: the directory has no shard, one is damaged, or they are not of one harvest.
    """

    epoch_stride = 0  # every epoch reads the same shards

    def __init__(self, directory: Path):
        paths = sorted(directory.glob("shard-*.safetensors"))
        if not paths:
            raise ArtifactError(f"{directory} has no shards; run: python data_gen/harvest.py RECIPE")
        shards = [Shard(path) for path in paths]
        for shard in shards[1:]:
            if shard.harvest != shards[0].harvest:
                raise ArtifactError(
                    f"{shards[0].path} and {shard.path.name} are of two harvests, {shards[0].harvest} and "
                    f"{shard.harvest}; delete the one that does not belong there and harvest again"
                )
        self._index = [(shard, i) for shard in shards for i in range(len(shard))]
        self.aux_layer_ids = shards[0].aux_layer_ids
        self.ids = [name for shard in shards for name in shard.ids]
        self.groups = [range(len(self._index))]

    def stored(self, index: int) -> StateSequence:
        shard, position = self._index[index]
        return shard.stored(position)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids (T,) int64 and loss mask (T,) uint8 of a sequence, without its states."""
        shard, position = self._index[index]
        return shard.rows(position, "input_ids").long(), shard.rows(position, "loss_mask")


def verify_store(directory: Path) -> list[str]:
    """What is broken in a finished store: a line per problem, each naming the file; none when it is whole.

    Every byte is read twice. The manifest's SHA-256 finds what was changed since the store was published; the shards'
    own checksums, what was changed between writing and publishing; the values, what was wrong from the start.
    """
    try:
        manifest = require(directory, KIND, "python data_gen/harvest.py RECIPE", thinned=True)
        listed, identity = manifest["files"], manifest["identity"]
        problems = [] if read_json(directory / IDENTITY) == identity else [f"{IDENTITY} differs from {MANIFEST}"]
        problems += [f"{name} is missing, or not as {MANIFEST} lists it" for name in verify_files(directory)]
    except (ArtifactError, FileNotFoundError, KeyError, TypeError) as error:
        return [f"{directory} cannot be verified: {error}"]
    names = {path.name for path in directory.glob("shard-*.safetensors")}
    problems += [f"{name} is not in {MANIFEST}" for name in sorted(names - set(listed))]
    with ThreadPoolExecutor() as pool:
        of_each = pool.map(lambda name: verify_shard(directory / name, identity), sorted(names))
        return problems + [problem for shard_problems in of_each for problem in shard_problems]


def verify_shard(path: Path, identity: dict[str, Any]) -> list[str]:
    """What is wrong inside one shard of a store with this identity: damage, another harvest, values not finite."""
    try:
        shard = Shard(path)
        expected = {name: identity.get(name, value) for name, value in shard.harvest.items()}
        problems = [f"holds {shard.harvest}, {IDENTITY} has {expected}"] if shard.harvest != expected else []
        for sequence in map(shard.__getitem__, range(len(shard))):
            parts = {f"aux.{layer_id}": rows for layer_id, rows in sequence.aux.items()}
            parts |= {"last_hidden": sequence.last_hidden, "lse": sequence.lse}
            for name, rows in parts.items():
                if not rows.isfinite().all():
                    problems.append(f"{name} of sequence {sequence.id} is not finite")
            if (first := sequence.first_teacher_row) > first_teacher_row(sequence.loss_mask):
                problems.append(f"sequence {sequence.id} has no teacher rows before token {first}")
    except ArtifactError as error:
        return [str(error)]
    except FileNotFoundError:  # of a spool: used up since it was listed
        return []
    return [f"{path.name}: {problem}" for problem in problems]
