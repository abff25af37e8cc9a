"""Which training texts share words with a held-out text: n-gram overlap, fast enough for every recipe.

ResponseTokens are compared as words, without case, white space and punctuation; a Chinese, Japanese or Korean character is a
word. Two texts overlap when they share 13 words in a row, the length of Brown et al. 2020 (arXiv:2005.14165,
appendix C): shorter runs are common in unrelated English, much longer ones miss questions with a number changed.
A text of fewer than 13 words overlaps only its equal.

Runs that many documents share are a template, such as the instruction above every article of a benchmark, and tell
nothing about the document: they are counted, and words of a template make no run with the words beside it. Given up:
paraphrases and translations. Words become 64-bit hashes, so a chance match among 10^8 training and 10^7 held-out runs
has a probability of about 10^-4.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

N = 13  # words
_CJK = "぀-ヿ㐀-䶿一-鿿가-힯"
_WORD = re.compile(f"[{_CJK}]|[^\\W{_CJK}]+")
_CHUNK = 2_000_000  # words hashed at once: about 100 MB
_PLACE_BITS = 24  # a text of 16 million words
_LEADING_BITS = 24
_BASE = 0x9E3779B97F4A7C15 | 1
Hashes = NDArray[np.uint64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """A prompt as the comparison sees it.

    Attributes:
        id: of the prompt.
        source: data set it came from.
        document: what it was cut from; runs are counted once per document.
        text: of all its messages.
    """

    id: str
    source: str
    document: str
    text: str


@dataclass(frozen=True)
class Overlap:
    """A training text and the first held-out text it shares a run with.

    Attributes:
        train, heldout: the two texts.
        runs: how many different runs of the training text are held out.
        words: the first of them.
    """

    train: Text
    heldout: Text
    runs: int
    words: str


@dataclass(frozen=True)
class Overlaps:
    """What the comparison found.

    Attributes:
        found: one per training text that overlaps.
        templates: how many runs were not compared because so many documents share them.
    """

    found: list[Overlap]
    templates: int


def find_overlaps(train: Sequence[Text], heldout: Sequence[Text]) -> Overlaps:
    """Every training text that shares a run of words with a held-out text, in the order of `train`."""
    hasher = _Hasher()
    held, held_place = _concatenated(hasher.runs(heldout))
    runs, inverse = np.unique(held, return_inverse=True)
    first = np.zeros(len(runs), dtype=np.int64)  # run -> the first held-out text that has it
    first[inverse[::-1]] = _text_at(held_place[::-1])
    run, place = _shared(hasher, train, runs)
    template = _in_many_documents(inverse, _text_at(held_place), heldout, len(runs))
    template |= _in_many_documents(run, _text_at(place), train, len(runs))
    kept = _far_from(place, place[template[run]])
    run, place = run[kept], place[kept]
    texts, starts = np.unique(_text_at(place), return_index=True)  # hits are in the order of the texts and their words
    distinct = np.unique(np.stack([_text_at(place), run]), axis=1)
    sizes = np.unique(distinct[0], return_counts=True)[1]
    found = []
    for i, start, size in zip(texts, starts, sizes, strict=True):
        words = hasher.words_of(train[i], runs[run[start]])
        found.append(Overlap(train[i], heldout[first[run[start]]], int(size), words))
    return Overlaps(found, int(template.sum()))


def _shared(hasher: "_Hasher", texts: Sequence[Text], runs: Hashes) -> tuple[Indices, Indices]:
    """(index in the sorted `runs`, place) of every run of `texts` that is one of `runs`.

    Chunk by chunk, so memory follows what is shared. Looking a hash up in millions is slow; most are ruled out by
    their leading bits first.
    """
    leading = np.zeros(2**_LEADING_BITS, dtype=bool)
    shift = np.uint64(64 - _LEADING_BITS)
    leading[runs >> shift] = True
    found: list[tuple[Indices, Indices]] = []
    for hashes, places in hasher.runs(texts):
        likely = np.flatnonzero(leading[hashes >> shift])
        where = np.minimum(np.searchsorted(runs, hashes[likely]), max(len(runs) - 1, 0))
        hit = runs[where] == hashes[likely] if len(runs) else np.zeros(0, dtype=bool)
        found.append((where[hit], places[likely[hit]]))
    return _concatenated(found)


def _far_from(place: Indices, template: Indices) -> NDArray[np.bool_]:
    """Which runs share no word with a run of a template in the same text."""
    if not len(template):
        return np.ones(len(place), dtype=bool)
    template = np.sort(template)
    after = np.searchsorted(template, place)
    distance = np.minimum(
        np.abs(template[np.minimum(after, len(template) - 1)] - place),
        np.abs(template[np.maximum(after - 1, 0)] - place),
    )
    return distance >= N


def _text_at(place: Indices) -> Indices:
    return place >> _PLACE_BITS


def words_of(text: str) -> list[str]:
    """The words that are compared."""
    return _WORD.findall(text.casefold())


def _in_many_documents(run: Indices, text: Indices, texts: Sequence[Text], num_runs: int) -> NDArray[np.bool_]:
    """(num_runs,) whether more documents have the run than 10 and than one in a hundred."""
    numbers: dict[tuple[str, str], int] = defaultdict(count().__next__)
    document = np.array([numbers[t.source, t.document or t.id] for t in texts], dtype=np.int64)
    pairs = np.unique(run * max(len(numbers), 1) + document[text])
    counts = np.bincount(pairs // max(len(numbers), 1), minlength=num_runs)
    return counts > max(10, len(numbers) / 100)


def _concatenated(chunks: Iterable[tuple[NDArray[Any], Indices]]) -> tuple[NDArray[Any], Indices]:
    parts = list(chunks)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


class _Hasher:
    """Runs of words as 64-bit hashes: sum over k of h(word k) * base^k, modulo 2^64."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = defaultdict(count(1).__next__)
        powers = [pow(_BASE, k, 2**64) for k in range(N)]
        self._powers = np.array(powers, dtype=np.uint64)

    def runs(self, texts: Sequence[Text]) -> Iterator[tuple[Hashes, Indices]]:
        """Chunks of (hash of each run, its place: index of its text << _PLACE_BITS | word it starts at)."""
        pending: list[Hashes] = []
        start = size = 0
        for i, text in enumerate(texts):
            pending.append(self._word_hashes(words_of(text.text)))
            size += len(pending[-1])
            if size >= _CHUNK:
                yield self._runs_of(pending, start)
                pending, start, size = [], i + 1, 0
        yield self._runs_of(pending, start)

    def words_of(self, text: Text, run: np.uint64) -> str:
        """The words whose hash is `run`."""
        words = words_of(text.text)
        hashes, _ = self._runs_of([self._word_hashes(words)], 0)
        start = int(np.flatnonzero(hashes == run)[0])
        return " ".join(words[start : start + N])

    def _word_hashes(self, words: list[str]) -> Hashes:
        x = np.fromiter(map(self._numbers.__getitem__, words), dtype=np.uint64, count=len(words))
        # splitmix64's finaliser: neighbouring numbers become unrelated ones.
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    def _runs_of(self, texts: list[Hashes], start: int) -> tuple[Hashes, Indices]:
        lengths = np.array([len(t) for t in texts], dtype=np.int64)
        # A short text is padded with its own length: it can only equal a text of the same words.
        padded = [t if len(t) >= N else np.append(t, np.full(N - len(t), len(t), dtype=np.uint64)) for t in texts]
        padded = [t for t, length in zip(padded, lengths, strict=True) if length]
        owner = np.flatnonzero(lengths)
        sizes = np.maximum(lengths[owner], N)
        words = np.concatenate(padded) if padded else np.zeros(0, dtype=np.uint64)
        total = max(len(words) - N + 1, 0)
        runs = np.zeros(total, dtype=np.uint64)
        for k in range(N):
            runs += words[k : k + total] * self._powers[k]
        text = np.repeat(owner, sizes)
        inside = text[:total] == text[N - 1 :][:total]  # the run lies in one text
        word = np.arange(len(words)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = (text + start << _PLACE_BITS) | word
        return runs[inside], place[:total][inside]
