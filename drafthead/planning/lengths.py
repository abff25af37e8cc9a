"""How many sequences a recipe has and how long they are, as far as it is known.

Exact once the responses exist. Before, from the prompts, or from the recipe and the command line: an upper bound, as
every response is counted with the length that the recipe allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from drafthead.artifacts import MANIFEST
from drafthead.config import PromptsConfig, Recipe
from drafthead.data.prompts import read_prompts
from drafthead.data.reading import ParsedResponse
from drafthead.data.responses import read_parts
from drafthead.generation.dialogue import continuation, open_dialogue, prepare, rules_of
from drafthead.generation.prompt_mix import planned_prompts
from drafthead.generation.regenerate import SPLITS
from drafthead.planning import DEFAULT_PROMPTS, Assumed
from drafthead.target.tokenizer import load_tokenizer


@dataclass(frozen=True)
class SequenceLength:
    """Tokens before the response, of the response, and after it."""

    prompt: int
    response: int
    continuation: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.response + self.continuation

    @property
    def rows(self) -> int:
        """Rows that can be a teacher: from one before the first generated token on (see data.shard)."""
        return self.response + self.continuation + min(self.prompt, 1) if self.response else 0


@dataclass(frozen=True)
class SplitLengths:
    """The sequences of a split, and what their lengths were taken from."""

    split: str
    sequences: Sequence[SequenceLength]
    source: Literal["responses", "prompts", "recipe"]

    @property
    def exact(self) -> bool:
        return self.source == "responses"

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.sequences)

    @property
    def generated(self) -> int:
        """Tokens that the target generates."""
        return sum(one.response + one.continuation for one in self.sequences)


def all_lengths(recipe: Recipe, assumed: Assumed) -> list[SplitLengths]:
    """Of the training and the validation split."""
    return [split_lengths(recipe, split, assumed) for split in SPLITS]


def split_lengths(recipe: Recipe, split: str, assumed: Assumed) -> SplitLengths:
    """The sequences of "train" or "validation", as well as they are known."""
    if (recipe.responses_dir(split) / MANIFEST).exists():
        stored = chain.from_iterable(read_parts(recipe.responses_dir(split)).values())
        found = [SequenceLength(len(r.prompt_ids), len(r.response_ids), len(r.continuation_ids)) for r in stored]
        return SplitLengths(split, found, "responses")
    if (recipe.prompts_dir / MANIFEST).exists():
        return SplitLengths(split, _from_prompts(recipe, split, assumed), "prompts")
    after = continuation(recipe.head, split)
    response = min(assumed.response_tokens or recipe.responses.max_tokens, recipe.responses.max_tokens)
    prompt = min(assumed.prompt_tokens, recipe.engine.max_model_len - 1 - after - response)
    settings = recipe.prompts
    count = settings.validation if split == "validation" else assumed.prompts or planned(settings, "train")
    return SplitLengths(split, [SequenceLength(prompt, response, after)] * count, "recipe")


def planned(settings: PromptsConfig, split: str, otherwise: int = DEFAULT_PROMPTS) -> int:
    """Conversations of a recipe whose prompts are not drawn yet; `otherwise` where only files can tell."""
    return (planned_prompts(settings) or {}).get(split, otherwise)


def _from_prompts(recipe: Recipe, split: str, assumed: Assumed) -> list[SequenceLength]:
    """With the data's own responses, or with responses as long as there is room for."""
    tokenizer, prompts = load_tokenizer(recipe, templated=True), read_prompts(recipe.prompts_dir, split)
    rules = rules_of(recipe, split, tokenizer)
    longest = assumed.response_tokens or recipe.responses.max_tokens
    found: list[SequenceLength] = []
    dialogues = [open_dialogue(prompt, recipe.responses.turn_by_turn) for prompt in prompts]
    while dialogues:
        turns, _ = prepare(rules, dialogues)
        for turn in turns:
            response = min(turn.request.max_tokens, longest) if turn.given is None else len(turn.given)
            prompt = len(turn.request.prompt_ids) + turn.dialogue.turn * longest
            room = recipe.engine.max_model_len - 1 - rules.continuation - response
            found.append(SequenceLength(min(prompt, room), response, rules.continuation))
        # Responses of full length are counted above; one word stands for them in what is rendered.
        dialogues = [later for turn in turns if (later := turn.dialogue.after(ParsedResponse("yes")))]
    return found


def length_notes(recipe: Recipe, lengths: Sequence[SplitLengths], assumed: Assumed) -> list[str]:
    """What was assumed, a sentence each; nothing once the responses exist."""
    train, found = lengths[0], []
    if train.source == "recipe":
        found.append(
            f"no prompts yet: {len(train.sequences):,} of {train.sequences[0].prompt:,} tokens with one response each "
            "(--prompts, --prompt-tokens)"
        )
    if not train.exact:
        longest = assumed.response_tokens or recipe.responses.max_tokens
        bound = "" if assumed.response_tokens else "responses.max_tokens, an upper bound: "
        found.append(f"no responses yet: each counted with {bound}{longest:,} tokens (--response-tokens)")
    return found
