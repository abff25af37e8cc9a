"""Responses: what the target said, token for token, as Parquet parts.

The engine's own token ids are kept on both sides of the boundary, so the loss mask (0 on the prompt, 1
on the response) needs no parsing of a chat template.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from drafthead.provenance import ArtefactError, atomic_path

KIND = "responses"


@dataclass(frozen=True)
class Response:
    """One answer of the target.

    Attributes:
        id: the prompt's id.
        category: the prompt's category.
        prompt_ids: token ids the engine read (template applied).
        response_ids: token ids the engine produced, the stop token included.
        continuation_ids: what the engine would have said after the stop, greedily; only where acceptance
            is replayed, because vLLM counts accepted tokens before it trims at the stop.
        text: the response, decoded with special tokens.
        finish_reason: "stop" or "length".
        temperature: sampling temperature.
        reasoning_effort: as given to the chat template.
        seed: sampling seed.
    """

    id: str
    category: str
    prompt_ids: list[int]
    response_ids: list[int]
    continuation_ids: list[int]
    text: str
    finish_reason: str
    temperature: float
    reasoning_effort: str
    seed: int


_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("category", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("continuation_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("reasoning_effort", pa.string()),
        ("seed", pa.int64()),
    ]
)
_TEXT = ("prompt_ids", "response_ids", "continuation_ids")


def part_path(directory: Path, index: int) -> Path:
    """Where part `index` of a responses artefact lies."""
    return directory / f"part-{index:05d}.parquet"


def write_part(path: Path, responses: Sequence[Response]) -> None:
    """Write one part, whole or not at all."""
    with atomic_path(path) as temporary:
        pq.write_table(pa.Table.from_pylist([asdict(r) for r in responses], schema=_SCHEMA), temporary)


def read_responses(directory: Path) -> list[Response]:
    """All responses of an artefact, in prompt order.

    Raises:
        ArtefactError: the directory has no part.
    """
    return [Response(**row) for part in _parts(directory) for row in pq.read_table(part).to_pylist()]


def read_categories(directory: Path) -> dict[str, str]:
    """Category of every response by its id; empty where there are no responses."""
    tables = [pq.read_table(part, columns=["id", "category"]) for part in sorted(directory.glob("part-*.parquet"))]
    return {name: kind for t in tables for name, kind in zip(*(c.to_pylist() for c in t.columns), strict=True)}


class Texts:
    """Tokens and loss masks of all responses, one part in memory at a time: meant to be read in order.

    Raises:
        ArtefactError: the directory has no part.
    """

    def __init__(self, directory: Path):
        self._parts = _parts(directory)
        columns = [pq.read_table(part, columns=["id"])["id"].to_pylist() for part in self._parts]
        self.ids: list[str] = [name for column in columns for name in column]
        self._ends = list(accumulate(len(column) for column in columns))
        self._held: tuple[int, pa.Table] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (T,) int64 of prompt, response and continuation, and loss mask (T,) bool: the response."""
        part = bisect_right(self._ends, index)
        if self._held is None or self._held[0] != part:
            self._held = part, pq.read_table(self._parts[part], columns=list(_TEXT))
        table, row = self._held[1], index - [0, *self._ends][part]
        pieces = [table[name][row].values.to_numpy().astype(np.int64) for name in _TEXT]
        mask = [np.full(len(piece), name == "response_ids") for name, piece in zip(_TEXT, pieces, strict=True)]
        return np.concatenate(pieces), np.concatenate(mask)


def _parts(directory: Path) -> list[Path]:
    parts = sorted(directory.glob("part-*.parquet"))
    if not parts:
        raise ArtefactError(f"{directory} has no responses; run: python data_gen/regenerate.py RECIPE")
    return parts
