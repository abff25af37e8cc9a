"""Draws that follow from a seed and the content alone, and when two prompts count as the same."""

from collections import defaultdict
from collections.abc import Sequence

from drafthead.data.prompts import Prompt
from drafthead.provenance import digest


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
    said = [[m["role"], " ".join(m["content"].casefold().split())] for m in prompt.messages]
    calls = [m["tool_calls"] for m in prompt.messages if m.get("tool_calls")]
    return digest([said, calls, prompt.tools] if calls or prompt.tools else said)
