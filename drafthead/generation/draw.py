"""Draws that follow from a seed and the content alone, and when two prompts count as the same."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    place = number % sum(weights.values())
    for value, weight in weights.items():
        if place < weight:
            return value
        place -= weight
    raise AssertionError("the place lies below the sum of the weights")


def draw_evenly(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` prompts, categories as even as their sizes allow; deterministic in seed and content."""
    order = {prompt.id: digest([seed, prompt.id]) for prompt in prompts}
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda p: order[p.id]):
        by_category[prompt.category].append(prompt)
    # Rank within the category first: the first n of this order hold every category's first n / categories.
    ranked = [(rank, order[p.id], p) for group in by_category.values() for rank, p in enumerate(group)]
    drawn = sorted(ranked, key=lambda entry: entry[:2])[:limit]
    return sorted((prompt for _, _, prompt in drawn), key=lambda p: order[p.id])


def normalised(prompt: Prompt) -> str:
    """A key that prompts share when they differ in case and white space only."""
    if prompt.prompt_ids is not None:
        return prompt.id
    texts = [[m["role"], " ".join(m["content"].casefold().split())] for m in prompt.messages]
    calls = [m["tool_calls"] for m in prompt.messages if m.get("tool_calls")]
    return digest([texts, calls, prompt.tools] if calls or prompt.tools else texts)
