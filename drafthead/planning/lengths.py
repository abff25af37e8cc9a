"""How many sequences a recipe has and how long they are, as far as it is known.

Exact once the responses exist. Before, every response is counted with the length that the recipe allows, an upper
bound, after prompts of about four characters a token; before there are prompts, after a length from the command line.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from drafthead.artifacts import MANIFEST
from drafthead.config import Recipe
from drafthead.data.prompts import Prompt, read_prompts
from drafthead.data.responses import read_parts
from drafthead.generation.dialogue import continuation, open_dialogue
from drafthead.generation.prompts import own_prompts, planned_prompts
from drafthead.generation.regenerate import SPLITS
from drafthead.planning import DEFAULT_PROMPTS, TYPICAL_RESPONSE, Assumed


@dataclass(frozen=True)
class SplitLengths:
    """The sequences of a split.

    Attributes:
        split: "train" or "validation".
        parts: (S, 3) tokens of prompt, response and continuation of each sequence.
        note: what was assumed; empty once the responses exist.
    """

    split: str
    parts: np.ndarray
    note: str = ""

    @property
    def tokens(self) -> np.ndarray:
        """(S,) of each sequence."""
        return self.parts.sum(1)

    @property
    def total(self) -> int:
        """Tokens of all sequences."""
        return int(self.parts.sum())

    @property
    def rows(self) -> np.ndarray:
        """(S,) rows that can be a teacher: from one before the first generated token on (see data.shard)."""
        prompt, response, after = self.parts.T
        return np.where(response > 0, response + after + np.minimum(prompt, 1), 0)


def all_lengths(recipe: Recipe, assumed: Assumed) -> list[SplitLengths]:
    """Of the training and the validation split."""
    found = {split: _of_responses(recipe, split) for split in SPLITS}
    prompts = None if all(found.values()) else _known_prompts(recipe)
    return [found[split] or _assumed(recipe, split, assumed, prompts) for split in SPLITS]


def _of_responses(recipe: Recipe, split: str) -> SplitLengths | None:
    if not (recipe.responses_dir(split) / MANIFEST).exists():
        return None
    stored = chain.from_iterable(read_parts(recipe.responses_dir(split)).values())
    parts = [(len(r.prompt_ids), len(r.response_ids), len(r.continuation_ids)) for r in stored]
    return SplitLengths(split, np.array(parts))


def _known_prompts(recipe: Recipe) -> Mapping[str, Sequence[Prompt]] | None:
    """The prompts of each split, as drawn or from the recipe's own file; None before data sets were drawn from."""
    if (recipe.prompts_dir / MANIFEST).exists():
        return {split: read_prompts(recipe.prompts_dir, split) for split in SPLITS}
    return own_prompts(recipe.prompts) if recipe.prompts.path else None


def _assumed(
    recipe: Recipe, split: str, assumed: Assumed, prompts: Mapping[str, Sequence[Prompt]] | None
) -> SplitLengths:
    longest = assumed.response_tokens or min(recipe.responses.max_tokens, TYPICAL_RESPONSE)
    after = continuation(recipe.head, split)
    note = f"no responses yet: each counted with {longest:,} tokens (--response-tokens)"
    if prompts:
        counted = [turn for prompt in prompts[split] for turn in _turns(recipe, split, prompt, longest)]
    else:
        planned = {"validation": recipe.prompts.validation, **planned_prompts(recipe.prompts)}
        if assumed.prompts:
            planned["train"] = assumed.prompts
        counted = [(assumed.prompt_tokens, longest)] * planned.get(split, DEFAULT_PROMPTS)
        note = f"no prompts yet: {assumed.prompt_tokens:,} tokens each (--prompts, --prompt-tokens)\n{note}"
    room = recipe.engine.max_model_len - 1 - after
    prompt, response = np.array(counted).T
    prompt = np.minimum(prompt, room - 1)
    response = np.minimum(response, room - prompt)
    return SplitLengths(split, np.stack([prompt, response, np.full_like(prompt, after)], 1), note)


def _turns(recipe: Recipe, split: str, prompt: Prompt, longest: int) -> Iterator[tuple[int, int]]:
    """Tokens of prompt and response of each turn of a conversation, the later ones with the earlier ones before."""
    if not recipe.responses.regenerates(split):
        yield _estimated(prompt.messages), _estimated(prompt.response)
        return
    dialogue, tokens = open_dialogue(prompt, recipe.responses.turn_by_turn), len(prompt.prompt_ids or ())
    for messages in (dialogue.messages, *dialogue.later):
        tokens += _estimated(messages)
        yield tokens, longest
        tokens += longest


def _estimated(messages: object) -> int:
    return len(str(messages)) // 4  # about four characters a token
