"""The target answers conversations turn by turn: all first questions at once, then all second ones, and so on.

A round is one batch for the engine, which refills it as answers end. Given up: a full batch at the end of each round,
where the longest answers run alone; large parts make that rare. A conversation ends early when its answer was cut
off, is no message to the user, or was dropped by the recipe: nobody would go on from there, and a later question
asked on top of something else would not be what a server sees. Its further questions are counted.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.data.prompts import Prompt
from drafthead.data.reading import ParsedResponse, response_parser
from drafthead.data.responses import LeftOut, Response
from drafthead.engine.answering import Answer, Answerer, Ask
from drafthead.generation.responses.asking import Request, continuation, prepare
from drafthead.generation.responses.dialogue import open_dialogue
from drafthead.generation.responses.judging import DROPPED, TRUNCATED, dropped, judge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDED = "an earlier answer of the conversation was "


class Interviewer:
    """Asks the target and keeps what it says."""

    def __init__(self, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", answerer: Answerer):
        self._recipe, self._tokenizer, self._answerer = recipe, tokenizer, answerer
        self._read = response_parser(tokenizer)

    def interview(self, split: str, prompts: Sequence[Prompt], bar: tqdm) -> tuple[list[Response], list[LeftOut]]:
        """Answers to every question of the prompts, in their order, and what is missing among them.

        Args:
            split: "train" or "validation"; the latter is answered greedily and past the stop.
            prompts: to be answered.
            bar: advances by the number of questions in `prompts`.
        """
        place = {prompt.id: i for i, prompt in enumerate(prompts)}
        responses: list[tuple[int, int, Response]] = []
        left_out: list[LeftOut] = []
        dialogues = [open_dialogue(prompt, self._recipe.responses.turn_by_turn) for prompt in prompts]
        while dialogues:
            requests, lost = prepare(self._recipe, self._tokenizer, split, dialogues)
            dialogues = []
            for request, answer, beyond in self._ask(split, requests, bar):
                dialogue, said = request.dialogue, self._read(answer.token_ids)
                response = self._response(request, answer, beyond, said)
                if drop := dropped(self._recipe.responses, response.flags):
                    left_out.append(LeftOut(response.id, response.category, DROPPED, response.flags))
                else:
                    responses.append((place[dialogue.prompt.id], dialogue.turn, response))
                following = dialogue.after(said)
                if following and (why := _ends(response, said, drop)):
                    lost.append(LeftOut(following.id, response.category, ENDED + why, turns=following.turns_left))
                elif following:
                    dialogues.append(following)
            bar.update(sum(entry.turns for entry in lost))
            left_out += lost
        return [response for _, _, response in sorted(responses, key=lambda entry: entry[:2])], left_out

    def _ask(self, split: str, requests: Sequence[Request], bar: tqdm) -> list[tuple[Request, Answer, list[int]]]:
        if not requests:  # all of a round may be lost before it is asked
            return []
        count = continuation(self._recipe, split)
        names = [request.dialogue.id for request in requests]  # states are those of the whole text
        asks = [
            Ask(r.prompt_ids, r.max_tokens, r.sampling.temperature, r.sampling.seed, keep="" if count else name)
            for r, name in zip(requests, names, strict=True)
        ]
        answers = self._answerer.answer(asks, bar)
        beyond: list[list[int]] = [[] for _ in requests]
        if count:
            texts = [[*ask.prompt_ids, *answer.token_ids] for ask, answer in zip(asks, answers, strict=True)]
            further = [
                Ask(text, count, 0.0, 0, ignore_stop=True, keep=name) for text, name in zip(texts, names, strict=True)
            ]
            beyond = [answer.token_ids for answer in self._answerer.answer(further)]
        return list(zip(requests, answers, beyond, strict=True))

    def _response(self, request: Request, answer: Answer, beyond: list[int], said: ParsedResponse) -> Response:
        dialogue, sampling = request.dialogue, request.sampling
        return Response(
            id=dialogue.id,
            category=dialogue.prompt.category,
            prompt_ids=request.prompt_ids,
            response_ids=answer.token_ids,
            continuation_ids=beyond,
            text=str(self._tokenizer.decode(answer.token_ids, skip_special_tokens=False)),
            finish_reason=answer.finish_reason,
            temperature=sampling.temperature,
            reasoning_effort=sampling.effort,
            seed=sampling.seed,
            turn=dialogue.turn,
            flags=judge(self._recipe.responses, said, answer.token_ids, answer.finish_reason),
        )


def _ends(response: Response, said: ParsedResponse, drop: bool) -> str | None:
    """Why a conversation does not go on after this answer."""
    if TRUNCATED in response.flags:
        return "cut off"
    if drop:
        return "dropped"
    if said.is_call:
        return "a tool call"
    return None if said.content.strip() else "no message to the user"
