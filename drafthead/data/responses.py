"""Responses of the target, token for token, as Parquet parts.

The engine's own token ids are kept on both sides of the boundary, so the loss mask (0 on the prompt, 1
on the response) needs no parsing of a chat template.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from drafthead.artifacts import ArtifactError
from drafthead.files import atomic_path

KIND = "responses"
SPLITS = ("train", "validation")  # validation picks the checkpoint
LOOP_NGRAM = 8  # a repeated run of eight tokens is rarely honest text
LOOP_LIMIT = 0.1  # share of n-grams that occurred before; what exceeds it loops


@dataclass(frozen=True)
class Response:
    """One response of the target, or one that the data had.

    Attributes:
        id: the prompt's id; of a conversation that is generated turn by turn, with the turn appended ("...-2").
        category: the prompt's category.
        prompt_ids: token ids the engine read (template applied).
        response_ids: token ids the engine produced, the stop token included.
        continuation_ids: what the engine would have generated after the stop, greedily; only where acceptance
            is replayed, because vLLM counts accepted tokens before it trims at the stop.
        text: the response, decoded with special tokens.
        finish_reason: "stop", "length", or "given" for a response that the data had with a stop token at its end.
        temperature: sampling temperature; None: it was not sampled.
        reasoning_effort: reasoning effort that the chat template got.
        seed: sampling seed; None: it was not sampled.
        turn: number of the turn, from 0, in a conversation that is generated turn by turn.
        flags: faults of the response (generation.dialogue) that the recipe tolerates.
    """

    id: str
    category: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    continuation_ids: Sequence[int]
    text: str
    finish_reason: str
    temperature: float | None
    reasoning_effort: str
    seed: int | None
    turn: int = 0
    flags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LeftOut:
    """A response that was dropped, or could not be generated.

    Attributes:
        id, category: id and category that the response would have had.
        reason: why there is no response, for a person.
        flags: faults of a response that was generated and dropped.
        turns: number of missing responses: this one and those of the turns after it.
    """

    id: str
    category: str
    reason: str
    flags: list[str] = field(default_factory=list)
    turns: int = 1


_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int32(),
    int | None: pa.int64(),
    float | None: pa.float64(),
    Sequence[int]: pa.list_(pa.int32()),
    list[str]: pa.list_(pa.string()),
}
_SCHEMA = pa.schema({column.name: _TYPES[column.type] for column in fields(Response)})
_METADATA = b"drafthead"
LEARNED_PROMPT = 2  # in a loss mask
_TOKENS = ("prompt_ids", "response_ids", "continuation_ids")


def part_path(directory: Path, index: int) -> Path:
    """Where part `index` of a responses artifact lies."""
    return directory / f"part-{index:05d}.parquet"


def write_part(path: Path, responses: Sequence[Response], left_out: Sequence[LeftOut] = ()) -> None:
    """Write one part, whole or not at all; the file's metadata lists what was left out."""
    metadata = {"left_out": [asdict(entry) for entry in left_out]}
    schema = _SCHEMA.with_metadata({_METADATA: json.dumps(metadata).encode()})
    with atomic_path(path) as temporary:
        pq.write_table(pa.Table.from_pylist([asdict(r) for r in responses], schema=schema), temporary)


@dataclass(frozen=True)
class ResponseRows:
    """Rows of parts, read when they are iterated over: a plan of a billion tokens holds none of them.

    A part is read once for rows that follow each other; `text` is left empty.

    Attributes:
        pieces: a part, its first row and the row after the last one.
    """

    pieces: Sequence[tuple[Path, int, int]]

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)

    def __iter__(self) -> Iterator[Response]:
        for part, start, stop in self.pieces:
            table = _read_rows(part).slice(start, stop - start)
            for i, row in enumerate(table.drop_columns(list(_TOKENS)).to_pylist()):
                # 4 bytes a number; 33 in a list of Python's.
                row |= {name: array("i", table[name][i].values.to_numpy().tobytes()) for name in _TOKENS}
                yield Response(text="", **row)

    def __getitem__(self, rows: slice) -> "ResponseRows":
        start, stop, _ = rows.indices(len(self))
        pieces, before = [], 0
        for part, first, last in self.pieces:
            begin, end = max(first, first + start - before), min(last, first + stop - before)
            if begin < end:
                pieces.append((part, begin, end))
            before += last - first
        return ResponseRows(pieces)


def _read_rows(part: Path) -> pa.Table:
    """A part without texts; the one read last is kept, as long as it is the same file."""
    return _read_once(part, part.stat().st_ino, part.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read_once(part: Path, *_state: int) -> pa.Table:
    return pq.read_table(part, columns=[name for name in _SCHEMA.names if name != "text"]).combine_chunks()


def read_parts(directory: Path) -> dict[str, ResponseRows]:
    """The responses of every part by its name without the suffix, in order.

    Raises:
        ArtifactError: the directory has no part.
    """
    return {part.stem: read_part(part) for part in _parts(directory)}


def read_part(path: Path) -> ResponseRows:
    """The responses of one part."""
    return ResponseRows([(path, 0, pq.read_metadata(path).num_rows)])


def read_left_out(directory: Path) -> list[LeftOut]:
    """Every response that was left out, in order.

    Raises:
        ArtifactError: the directory has no part.
    """
    metadata = [json.loads(pq.read_schema(part).metadata[_METADATA]) for part in _parts(directory)]
    return [LeftOut(**entry) for part in metadata for entry in part["left_out"]]


def read_categories(directory: Path) -> dict[str, str]:
    """Category of every response by its id; empty where there are no responses."""
    tables = [pq.read_table(part, columns=["id", "category"]) for part in sorted(directory.glob("part-*.parquet"))]
    return {name: kind for t in tables for name, kind in zip(*(c.to_pylist() for c in t.columns), strict=True)}


class ResponseTokens:
    """Tokens and loss masks of all responses, one part in memory at a time: meant to be read in order.

    Args:
        directory: directory of a split's responses.
        learned_share: share of each prompt, counted from its end, that is marked as learned too.

    Raises:
        ArtifactError: the directory has no part.
    """

    def __init__(self, directory: Path, learned_share: float = 0):
        self._learned_share = learned_share
        columns = [(part, pq.read_table(part, columns=["id"])["id"].to_pylist()) for part in _parts(directory)]
        self.ids: list[str] = [name for _, ids in columns for name in ids]
        self._places = [(part, row) for part, ids in columns for row in range(len(ids))]

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (T,) int64 of prompt, response and continuation, and loss mask (T,) uint8, as in data.shard."""
        part, row = self._places[index]
        table = _read_rows(part)
        pieces = [table[name][row].values.to_numpy().astype(np.int64) for name in _TOKENS]
        return np.concatenate(pieces), loss_mask(pieces, table["turn"][row].as_py(), self._learned_share)


def prompt_of(name: str) -> str:
    """Id of the prompt of a response, whose own id has the number of the turn behind it in a chat."""
    return name.partition("-")[0]


def loss_mask(pieces: Sequence[Sequence[int] | np.ndarray], turn: int, learned_share: float) -> np.ndarray:
    """Loss mask (T,) uint8, as in data.shard, of the tokens of a prompt, its response and what follows that.

    Of a conversation that is generated turn by turn, the first turn's prompt is learned alone: what a later one repeats
    is learned already.
    """
    prompt, *following = map(len, pieces)
    learned = round(learned_share * prompt) if turn == 0 else 0
    return np.array([0, LEARNED_PROMPT, 1, 0], np.uint8).repeat([prompt - learned, learned, *following])


def _parts(directory: Path) -> list[Path]:
    parts = sorted(directory.glob("part-*.parquet"))
    if not parts:
        raise ArtifactError(f"{directory} has no responses; run: python data_gen/regenerate.py RECIPE")
    return parts


def repeated_share(token_ids: ArrayLike) -> float:
    """Share of a response's n-grams that occurred before in it: 0 for fresh text, near 1 for a loop."""
    ids = np.asarray(token_ids)
    if len(ids) < LOOP_NGRAM:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(ids, LOOP_NGRAM)
    return 1.0 - len(np.unique(windows, axis=0)) / len(windows)


def loops(token_ids: ArrayLike) -> bool:
    """Whether more than `LOOP_LIMIT` of a response repeats itself: one rule for every stage.

    Cheap, and blind to meaning; honest tables and code can reach the limit too. Looping responses are counted when they
    are generated, and left out of acceptance, predicted in training and measured in evaluation alike: nearly every
    draft of a loop is accepted, by any head, so loops would decide which checkpoint is best.
    """
    return repeated_share(token_ids) > LOOP_LIMIT
