"""Which training prompts share words with a held-out prompt.

Two texts overlap when they share 13 words in a row, the length of Brown et al. 2020 (arXiv:2005.14165, appendix C):
shorter runs are common in unrelated English, much longer ones miss questions with a number changed. Case, white space
and punctuation do not count; a Chinese, Japanese or Korean character is a word. A text of fewer than 13 words overlaps
only its equal. Given up: paraphrases and translations.

A run that many documents share is a template, such as the instruction above every article of a benchmark, and tells
nothing about the document. It is no overlap, nor is a run that has a word in common with it.

Only the hashes of held-out runs are kept: 8 bytes for each held-out word, more where training prompts have it too.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from drafthead.data.prompts import Prompt

N = 13  # words
_BATCH = 1000  # prompts whose runs are looked up at a time
_CJK = "぀-ヿ㐀-䶿一-鿿가-힯"
_WORD = re.compile(f"[{_CJK}]|[^\\W{_CJK}]+")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt that may be drawn.

    Attributes:
        prompt: the prompt as it would be written to a split.
        label: category of the prompt within its source, as a recipe names it.
        text_of_ids: text of a prompt of token ids, where the row has it.
    """

    prompt: Prompt
    label: str
    text_of_ids: str = ""

    @property
    def text(self) -> str:
        """For the comparison; put together when it is asked for, because chats share their messages."""
        ids = self.prompt.prompt_ids or ()
        return " ".join(m["content"] for m in self.prompt.messages) or self.text_of_ids or " ".join(map(str, ids))


@dataclass(frozen=True)
class Overlap:
    """A training prompt and the first held-out prompt it shares a run with.

    Attributes:
        train, heldout: the two prompts.
        runs: how many different runs of the training prompt are held out.
        words: words of the first shared run.
    """

    train: Prompt
    heldout: Prompt
    runs: int
    words: str


def find_overlaps(train: Sequence[Candidate], heldout: Sequence[Candidate]) -> list[Overlap]:
    """Every training prompt that shares a run of words with a held-out one, in the order of `train`."""
    held = np.unique(np.concatenate([_hashes([]), *(_hashes([_runs(candidate)]) for candidate in heldout)]))
    touching, both = [], set[int]()
    for start in range(0, len(train) if len(held) else 0, _BATCH):
        batch = train[start : start + _BATCH]
        runs_of = [_runs(candidate) for candidate in batch]
        runs_here = np.unique(_hashes(runs_of))
        places = np.minimum(np.searchsorted(held, runs_here), len(held) - 1)
        found_here = set(runs_here[held[places] == runs_here].tolist())
        touching += [c for c, runs in zip(batch, runs_of, strict=True) if not found_here.isdisjoint(runs)]
        both |= found_here
    first: dict[int, Prompt] = {}  # run -> the first held-out prompt that has it
    for candidate in reversed(heldout):
        first.update((run, candidate.prompt) for run in _runs(candidate) if run in both)
    train_documents, heldout_documents = (len(set(map(_document, side))) for side in (train, heldout))
    shared = _is_template(touching, first, train_documents)
    in_heldout = _is_template(heldout, shared, heldout_documents)
    overlaps = []
    for candidate in touching:
        runs = _runs(candidate)
        hits = [start for start, run in enumerate(runs) if run in shared]
        near: set[int] = set()  # where a run has a word in common with a template
        for start in hits:
            if shared[runs[start]] or in_heldout[runs[start]]:
                near.update(range(start - N + 1, start + N))
        if hits := [start for start in hits if start not in near]:
            words = words_of(candidate.text)[hits[0] : hits[0] + N]
            distinct = {runs[start] for start in hits}
            overlaps.append(Overlap(candidate.prompt, first[runs[hits[0]]], len(distinct), " ".join(words)))
    return overlaps


def _hashes(runs: Sequence[list[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(runs), np.int64)


def words_of(text: str) -> list[str]:
    """The words that are compared."""
    return _WORD.findall(text.casefold())


def _runs(candidate: Candidate) -> list[int]:
    """A hash of 64 bits for each run of N words, in order; all words of a shorter text are one run."""
    words = words_of(candidate.text)
    if 0 < len(words) < N:
        return [hash(tuple(words))]
    return [hash(run) for run in zip(*(words[k:] for k in range(N)), strict=False)]


def _document(candidate: Candidate) -> tuple[str, str]:
    return candidate.prompt.source, candidate.prompt.document or candidate.prompt.id


def _is_template(candidates: Sequence[Candidate], runs: Container[int], num_documents: int) -> dict[int, bool]:
    """Those of `runs` that the candidates have, and whether more than 10 documents, and than 1 % of all, have each."""
    documents: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        documents[_document(candidate)].append(candidate)
    counts: Counter[int] = Counter()
    for document in documents.values():
        counts.update({run for candidate in document for run in _runs(candidate) if run in runs})
    return {run: count > max(10, num_documents / 100) for run, count in counts.items()}
