"""Draws that follow from a seed and the content alone."""

from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import TypeVar

from drafthead.artifacts import digest
from drafthead.config.responses import Effort, ResponsesConfig
from drafthead.data.prompts import Prompt

_T = TypeVar("_T")


@dataclass(frozen=True)
class Sampling:
    """How one response is sampled."""

    temperature: float
    effort: Effort
    seed: int


def draw_sampling(settings: ResponsesConfig, prompt_id: str, turn: int, greedy: bool) -> Sampling:
    """Temperature and reasoning effort of a conversation, and the sampling seed of one of its turns.

    They follow from responses.seed and the prompt's id alone, the seed from the turn too.
    """
    number = _number(settings.seed, prompt_id)
    of_turn = number if turn == 0 else _number(settings.seed, prompt_id, turn)
    temperature = _weighted(settings.temperatures, _number(settings.seed, "temperature", prompt_id))
    return Sampling(0.0 if greedy else temperature, _weighted(settings.efforts, number), (of_turn >> 8) % 2**31)


def _number(*key: int | str) -> int:
    return int(digest(list(key))[:12], 16)


def _weighted(weights: Mapping[_T, int], number: int) -> _T:
    """The value on which a large number falls, modulo the sum of the weights."""
    ends = list(accumulate(weights.values()))
    return list(weights)[bisect(ends, number % ends[-1])]


def draw_evenly(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` prompts, categories as even as their sizes allow; deterministic in seed and content."""
    # Rank within the category first: the first n of this order hold every category's first n / categories.
    ranked: list[tuple[int, int, Prompt]] = []
    drawn: Counter[str] = Counter()
    for place, prompt in enumerate(sorted(prompts, key=lambda p: digest([seed, p.id]))):
        ranked.append((drawn[prompt.category], place, prompt))
        drawn[prompt.category] += 1
    return [prompt for _, _, prompt in sorted(sorted(ranked)[:limit], key=itemgetter(1))]
