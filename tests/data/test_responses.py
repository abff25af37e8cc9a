"""Responses read back token for token, in small arrays and as loss masks, and the rule for loops."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drafthead.artifacts import ArtifactError
from drafthead.data.responses import (
    Response,
    ResponseRows,
    ResponseTokens,
    loops,
    part_path,
    read_parts,
    repeated_share,
    write_part,
)  # fmt: skip
from tests.artifacts import read_responses, response

WANTED = [response("a", 2, 3, 1), response("b", 1, 0), response("c", 4, 2), response("d", 1, 1), response("e", 2, 2)]


@pytest.fixture
def directory(tmp_path) -> Path:
    for part in range(3):
        write_part(part_path(tmp_path, part), WANTED[2 * part : 2 * part + 2])
    return tmp_path


def tokens_of(one: Response) -> list[int]:
    return [*one.prompt_ids, *one.response_ids, *one.continuation_ids]


def test_tokens_of_several_parts_are_read_as_one(directory):
    tokens = ResponseTokens(directory)
    assert tokens.ids == list("abcde")
    for i in (0, 1, 2, 3, 4, 0):
        ids, mask = tokens.tokens(i)
        assert ids.tolist() == tokens_of(WANTED[i])
        assert np.flatnonzero(mask).tolist() == WANTED[i].response_ids  # ids count from 0
    with pytest.raises(ArtifactError, match=r"regenerate\.py"):
        ResponseTokens(directory / "none")


def test_rows_of_parts_are_the_responses_with_ids_of_four_bytes(directory):
    assert read_responses(directory) == WANTED
    parts = read_parts(directory)
    assert [[row.id for row in part] for part in parts.values()] == [["a", "b"], ["c", "d"], ["e"]]
    rows = ResponseRows([piece for part in parts.values() for piece in part.pieces])
    for row, original in zip(rows, WANTED, strict=True):
        assert tokens_of(row) == tokens_of(original)
        assert {ids.itemsize for ids in (row.prompt_ids, row.response_ids, row.continuation_ids)} == {4}
        as_given = {name: list(getattr(row, name)) for name in ("prompt_ids", "response_ids", "continuation_ids")}
        assert replace(row, text=original.text, **as_given) == original
    for start, stop in itertools.combinations_with_replacement(range(7), 2):
        assert [row.id for row in rows[start:stop]] == list("abcde"[start:stop])
        assert [row.id for row in rows[1:][start:stop]] == list("bcde"[start:stop])
    assert (len(rows[2:]), len(rows[2:2])) == (3, 0)


def test_the_share_of_8_grams_that_occurred_before_is_counted():
    assert repeated_share(range(100)) == repeated_share([1, 2, 3]) == repeated_share([]) == 0
    assert repeated_share([7] * 100) == pytest.approx(92 / 93)


def test_more_than_a_tenth_is_a_loop():
    # 41 tokens have 34 8-grams; repeating the last ten tokens adds ten, of which three occurred before.
    text = list(range(41))
    assert [loops(t) for t in (text, [*text, *text[-10:]], [1, 1])] == [False] * 3
    assert [loops(t) for t in ([*text, *text[-20:]], [1, 2, 3] * 10)] == [True] * 2
