"""From a question to the request that goes to the target: rendered, sampled by draw, with its room; or why not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drafthead.config import Recipe
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.data.responses import LeftOut
from drafthead.generation.draw import Sampling, draw_sampling
from drafthead.generation.responses.dialogue import Dialogue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_ROOM = "no room for a response in engine.max_model_len"


@dataclass(frozen=True)
class Request:
    """One question as the target gets it.

    Attributes:
        dialogue: whose question it is.
        prompt_ids: chat template applied.
        max_tokens: room for the response.
        sampling: drawn for it.
    """

    dialogue: Dialogue
    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling


def prepare(
    recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", split: str, dialogues: Sequence[Dialogue]
) -> tuple[list[Request], list[LeftOut]]:
    """Tokenise the questions at hand; those that cannot be answered come back with a reason."""
    requests: list[Request] = []
    left_out: list[LeftOut] = []
    render = renderer(recipe, tokenizer)
    for dialogue in dialogues:
        sampling = draw_sampling(recipe.responses, dialogue.prompt.id, dialogue.turn, greedy=split == "validation")
        try:
            prompt_ids = render(dialogue.question, sampling.effort)
        except UnrenderableError as error:
            left_out.append(_lost(dialogue, error.reason))
            continue
        room = room_after(recipe, split, len(prompt_ids))
        if room < 1:
            left_out.append(_lost(dialogue, NO_ROOM))
            continue
        requests.append(Request(dialogue, prompt_ids, min(room, recipe.responses.max_tokens), sampling))
    return requests, left_out


def room_after(recipe: Recipe, split: str, num_prompt_tokens: int) -> int:
    """How many tokens a response may have after a prompt.

    One token stays free: an engine never reads its own last token, and the harvest generates one more.
    """
    return recipe.engine.max_model_len - 1 - num_prompt_tokens - continuation(recipe, split)


def continuation(recipe: Recipe, split: str) -> int:
    """Tokens generated past the stop: K where acceptance is replayed, because vLLM counts before it trims."""
    return recipe.head.num_positions if split == "validation" else 0


def _lost(dialogue: Dialogue, reason: str) -> LeftOut:
    """With everything that would have been asked later."""
    return LeftOut(dialogue.id, dialogue.prompt.category, reason, turns=dialogue.turns_left)
