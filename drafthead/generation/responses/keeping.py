"""`responses.regenerate: false`: the answers that the data has, in the form in which the target would have said them.

No engine runs. The reasoning effort is drawn as it would be for an answer of the target, because the template writes
it into the prompt; temperature and seed are empty, because nobody sampled. Given up: the text is not the target's
own, so the head learns to follow the target along paths that the target would not take.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.data.kept import Kept, KeptResponses
from drafthead.data.prompts import Prompt
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.data.responses import LeftOut, Response
from drafthead.generation.draw import draw_sampling
from drafthead.generation.responses.asking import NO_ROOM, room_after
from drafthead.generation.responses.judging import DROPPED, dropped, judge
from drafthead.target.tokenizer import stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GIVEN = "given"  # finish_reason of an answer that no engine ended


class Keeper:
    """Turns the data's answers into responses."""

    def __init__(self, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase"):
        """Raises ValueError when the chat template gives no stable boundaries."""
        self._recipe, self._tokenizer = recipe, tokenizer
        stops = stop_tokens(recipe, tokenizer)
        self._kept = KeptResponses(renderer(recipe, tokenizer), tokenizer, stops)

    def keep(self, prompts: Sequence[Prompt], bar: tqdm) -> tuple[list[Response], list[LeftOut]]:
        """The answers of training prompts, and what is missing among them."""
        responses: list[Response] = []
        left_out: list[LeftOut] = []
        for prompt in prompts:
            bar.update(1)
            effort = draw_sampling(self._recipe.responses, prompt.id, turn=0, greedy=False).effort
            try:
                kept = self._kept(prompt, effort)
            except UnrenderableError as error:
                left_out.append(LeftOut(prompt.id, prompt.category, error.reason))
                continue
            response = self._response(prompt, kept, effort)
            if len(kept.response_ids) > room_after(self._recipe, "train", len(kept.prompt_ids)):
                left_out.append(LeftOut(prompt.id, prompt.category, NO_ROOM))
            elif dropped(self._recipe.responses, response.flags):
                left_out.append(LeftOut(prompt.id, prompt.category, DROPPED, response.flags))
            else:
                responses.append(response)
        return responses, left_out

    def _response(self, prompt: Prompt, kept: Kept, effort: str) -> Response:
        return Response(
            id=prompt.id,
            category=prompt.category,
            prompt_ids=kept.prompt_ids,
            response_ids=kept.response_ids,
            continuation_ids=[],
            text=str(self._tokenizer.decode(kept.response_ids, skip_special_tokens=False)),
            finish_reason=GIVEN,
            temperature=None,
            reasoning_effort=effort,
            seed=None,
            flags=judge(self._recipe.responses, kept.parsed, kept.response_ids, GIVEN),
        )
