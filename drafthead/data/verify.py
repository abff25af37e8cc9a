"""Is a store what it says it is? Checksums first, then the structure and the values of every shard.

Every byte is read twice, once for its checksum and once for its value: a flipped bit shows in the first, states that
were wrong from the start (not finite, or of another length than their text) in the second.

Shapes: T tokens, R tail rows, S sequences, H hidden.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafthead.drafters.batch import first_loss_row
from drafthead.data.shard import LAST, SUMS, TAIL, Shard
from drafthead.provenance import IDENTITY, MANIFEST, ArtefactError, read_json, read_manifest, verify_files


def verify_store(directory: Path) -> list[str]:
    """What is broken in a finished store: a line per problem, each naming the file; none when it is whole."""
    if not (directory / MANIFEST).exists():
        state = "is half finished" if directory.exists() else "does not exist"
        return [f"{directory} {state}; run: python data_gen/harvest.py RECIPE"]
    try:
        manifest = read_manifest(directory)
        listed, identity = manifest["files"], manifest["identity"]
        different = [] if read_json(directory / IDENTITY) == identity else [f"{IDENTITY} differs from {MANIFEST}"]
        problems = different + [_file_problem(directory, name, listed[name]) for name in verify_files(directory)]
    except (ArtefactError, FileNotFoundError, KeyError, TypeError) as error:
        return [f"{directory / MANIFEST} cannot be read: {error}"]
    found = {path.name for path in directory.glob("shard-*.safetensors")}
    problems += [f"{name} is not in {MANIFEST}" for name in sorted(found - set(listed))]
    return problems + [problem for name in sorted(found) for problem in verify_shard(directory / name, identity)]


def _file_problem(directory: Path, name: str, listed: dict[str, Any]) -> str:
    path = directory / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != listed["bytes"]:
        return f"{name} has {path.stat().st_size:,} bytes, {MANIFEST} says {listed['bytes']:,}"
    return f"{name} has another SHA-256 than {MANIFEST} says: its bytes were changed after the harvest"


def verify_shard(path: Path, identity: dict[str, Any]) -> list[str]:
    """What is wrong inside one shard.

    Args:
        path: of the shard.
        identity: of its store; aux layer ids, number format and hidden size are compared where it names them.
    """
    try:
        shard = Shard(path)
        said = {"aux_layer_ids": shard.aux_layer_ids, "format": shard.number_format}
        problems = [
            f"{name} is {found}, {IDENTITY} says {identity[name]}"
            for name, found in said.items()
            if name in identity and identity[name] != found
        ]
        # Rows can be cut out only where offsets and shapes hold.
        problems = problems or list(_structure(shard, identity.get("hidden_size"))) or list(_values(shard))
    except ArtefactError as error:
        return [str(error)]
    return [f"{path.name}: {problem}" for problem in problems]


def _structure(shard: Shard, hidden_size: int | None) -> Iterator[str]:
    """Names, offsets, shapes."""
    layers = [f"aux.{layer_id}" for layer_id in shard.aux_layer_ids]
    scales = [f"{layer_id}.scale" for layer_id in layers] if shard.number_format == "fp8" else []
    wanted = {"input_ids", "loss_mask", "offsets", "tail_offsets", "argmax", "lse", SUMS, *layers, *scales}
    if shard.names - {LAST} != wanted:
        yield f"it holds {sorted(shard.names)}, wanted {sorted(wanted)}"
        return
    tokens, rows = len(shard.tensor("input_ids")), len(shard.tensor("argmax"))
    for name, end in (("offsets", tokens), ("tail_offsets", rows)):
        offsets = shard.tensor(name)
        if len(offsets) != len(shard) + 1 or offsets[0] != 0 or offsets[-1] != end or (offsets.diff() < 0).any():
            yield f"{name} do not lead from 0 to {end} in {len(shard)} ascending steps"
    hidden = hidden_size if hidden_size is not None else shard.shape(layers[0])[1]
    states = {*layers, *({LAST} & shard.names)}
    for name in sorted(shard.names - {"offsets", "tail_offsets", SUMS}):
        length = rows if name in TAIL else tokens
        shape = [length, hidden] if name in states else [length]
        if shard.shape(name) != shape:
            yield f"{name} has shape {shard.shape(name)}, wanted {shape}"


def _values(shard: Shard) -> Iterator[str]:
    """Each sequence: numbers that are finite, a mask of zeros and ones, and a tail that begins early enough."""
    for i, name in enumerate(shard.ids):
        sequence = shard[i]
        states = {f"aux.{layer_id}": rows for layer_id, rows in sequence.aux.items()}
        for kind, values in {**states, LAST: sequence.last_hidden, "lse": sequence.lse}.items():
            if not torch.isfinite(values).all():
                yield f"{kind} of sequence {name} is not finite at {_first(~torch.isfinite(values))}"
        for kind, wrong in (
            ("loss_mask", sequence.loss_mask > 1), ("input_ids", sequence.input_ids < 0), ("argmax", sequence.argmax < 0)
        ):  # fmt: skip
            if wrong.any():
                yield f"{kind} of sequence {name} has an impossible value at {_first(wrong)}"
        if sequence.loss_mask.any() and sequence.first_row > first_loss_row(sequence.loss_mask):
            yield f"sequence {name} lacks loss rows: they are stored from token {sequence.first_row} on"


def _first(wrong: Tensor) -> str:
    """Where the first wrong entry is, counted within the sequence."""
    return f"row {int(wrong.nonzero()[0, 0])}"
