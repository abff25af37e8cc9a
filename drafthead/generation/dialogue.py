"""Conversations generated turn by turn: the prompt of each turn, its response, and what is wrong with that.

Each response is one stored sequence: the prompt as the engine read it, then the response. A later turn's prompt is
rendered anew from the messages, as a server does it, and is not the tokens of the turns before: Harmony drops the
analysis of earlier responses, other templates move or trim text. One sequence for the whole chat would therefore hold
tokens that no engine ever read in that place. What the exact form costs is that a chat's beginning is stored, and its
states are harvested, once per turn.

A round of turns is one batch for the engine, see `generate_responses`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.config.responses import ResponsesConfig
from drafthead.data.prompts import Prompt
from drafthead.data.reading import ParsedResponse, response_parser
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.data.responses import LeftOut, Response, loops
from drafthead.engine.generate import Generation, GenerationRequest, Generator
from drafthead.generation.draw import Sampling, draw_sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

TRUNCATED, REFUSED, LOOPING = "truncated", "refused", "looping"
FLAGS = (TRUNCATED, REFUSED, LOOPING)
DROPPED = "dropped"  # the reason why a response with a flag is missing
ENDED = "an earlier answer of the conversation was "  # as it is stored in the parts
NO_ROOM = "no room for a response in engine.max_model_len"
_QUOTES = str.maketrans("\u2018\u2019", "''")


@dataclass(frozen=True)
class Dialogue:
    """A conversation up to the turn that is generated next.

    Attributes:
        prompt: as it was drawn, with the user's messages of all turns.
        messages: the prompt of this turn.
        later: the messages that follow each further response.
        turn: number of the turn, from 0.
    """

    prompt: Prompt
    messages: tuple[Message, ...]
    later: tuple[tuple[Message, ...], ...] = ()
    turn: int = 0

    @property
    def id(self) -> str:
        """Of the response: the prompt's id, with the turn where the conversation has several (1 is the first)."""
        return f"{self.prompt.id}-{self.turn + 1}" if self.turn or self.later else self.prompt.id

    @property
    def turns_left(self) -> int:
        """Responses to come, this turn's included."""
        return 1 + len(self.later)

    def after(self, response: ParsedResponse) -> "Dialogue | None":
        """The next turn, with this response in its history; None at the end."""
        if not self.later:
            return None
        history = (*self.messages, response.message(), *self.later[0])
        return replace(self, messages=history, later=self.later[1:], turn=self.turn + 1)


def open_dialogue(prompt: Prompt, turn_by_turn: bool) -> Dialogue:
    """A conversation at its first turn, or at its last one with the history of the data.

    Tool results belong to the calls that were made, so a conversation with tools in it keeps its history.
    """
    used_tools = any(m["role"] == "tool" or m.get("tool_calls") for m in prompt.messages)
    if prompt.prompt_ids is not None or used_tools or not turn_by_turn:
        return Dialogue(prompt, prompt.messages)
    first, *later = _turns(prompt.messages)
    return Dialogue(prompt, first, tuple(later))


def _turns(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """The messages before each response; an assistant's messages before the user's first stay where they are.

    Of  s u1 a1 u2 a2 a3 u3  that is  [s u1] [u2] [u3].
    """
    turns: list[list[Message]] = [[]]
    user_spoke = False
    for message in messages:
        if message["role"] != "assistant" or not user_spoke:
            turns[-1].append(message)
            user_spoke = user_spoke or message["role"] == "user"
        elif turns[-1]:
            turns.append([])
    return [tuple(turn) for turn in turns]


@dataclass(frozen=True)
class Turn:
    """One turn as the target gets it.

    Attributes:
        dialogue: up to this turn.
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
) -> tuple[list[Turn], list[LeftOut]]:
    """Render the next turn of each dialogue; those that cannot have a response come back with a reason."""
    turns: list[Turn] = []
    left_out: list[LeftOut] = []
    render = renderer(recipe, tokenizer)
    for dialogue in dialogues:
        prompt = replace(dialogue.prompt, messages=dialogue.messages)
        sampling = draw_sampling(recipe.responses, prompt.id, dialogue.turn, greedy=split == "validation")
        try:
            prompt_ids = render(prompt, sampling.effort)
            reason = NO_ROOM
        except UnrenderableError as error:
            prompt_ids, reason = None, error.reason
        if prompt_ids is not None and (room := room_after(recipe, split, len(prompt_ids))) > 0:
            turns.append(Turn(dialogue, prompt_ids, min(room, recipe.responses.max_tokens), sampling))
        else:
            left_out.append(LeftOut(dialogue.id, prompt.category, reason, turns=dialogue.turns_left))
    return turns, left_out


def room_after(recipe: Recipe, split: str, num_prompt_tokens: int) -> int:
    """How many tokens a response may have after a prompt.

    One token stays free: an engine never reads its own last token, and the harvest generates one more.
    """
    return recipe.engine.max_model_len - 1 - num_prompt_tokens - continuation(recipe, split)


def continuation(recipe: Recipe, split: str) -> int:
    """Tokens generated past the stop: K where acceptance is replayed, because vLLM counts before it trims."""
    return recipe.head.num_positions if split == "validation" else 0


def generate_responses(
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase",
    generator: Generator,
    split: str,
    prompts: Sequence[Prompt],
    bar: tqdm,
) -> tuple[list[Response], list[LeftOut]]:
    """Responses to every turn of the prompts, in their order, and what is missing among them.

    All first turns are one batch for the engine, then all second ones, and so on. Given up: a full batch at the end of
    each round, where the longest responses run alone; large parts make that rare. A conversation ends early when its
    response was cut off, is no message to the user, or was dropped: a later turn on top of something else would not be
    what a server sees. Its further turns are counted.

    Args:
        recipe: engine, responses and train sections are used.
        tokenizer: of the target.
        generator: runs the target.
        split: "train" or "validation"; the latter is generated greedily and past the stop.
        prompts: of a part.
        bar: advances by the number of turns in `prompts`.
    """
    read, settings = response_parser(tokenizer), recipe.responses
    responses: dict[str, list[Response]] = {prompt.id: [] for prompt in prompts}
    left_out: list[LeftOut] = []
    dialogues = [open_dialogue(prompt, settings.turn_by_turn) for prompt in prompts]
    while dialogues:
        turns, lost = prepare(recipe, tokenizer, split, dialogues)
        dialogues = []
        for turn, generation, beyond in _generate(generator, turns, continuation(recipe, split), bar):
            dialogue, message = turn.dialogue, read(generation.token_ids)
            response = Response(
                id=dialogue.id,
                category=dialogue.prompt.category,
                prompt_ids=turn.prompt_ids,
                response_ids=generation.token_ids,
                continuation_ids=beyond,
                text=str(tokenizer.decode(generation.token_ids, skip_special_tokens=False)),
                finish_reason=generation.finish_reason,
                temperature=turn.sampling.temperature,
                reasoning_effort=turn.sampling.effort,
                seed=turn.sampling.seed,
                turn=dialogue.turn,
                flags=flags_of(settings, message, generation.token_ids, generation.finish_reason),
            )
            drop = settings.drops(response.flags)
            if drop:
                left_out.append(LeftOut(response.id, response.category, DROPPED, response.flags))
            else:
                responses[dialogue.prompt.id].append(response)
            following = dialogue.after(message)
            if following and (why := _ends(response, message, drop)):
                lost.append(LeftOut(following.id, response.category, ENDED + why, turns=following.turns_left))
            elif following:
                dialogues.append(following)
        bar.update(sum(entry.turns for entry in lost))
        left_out += lost
    return list(chain.from_iterable(responses.values())), left_out


def _generate(
    generator: Generator, turns: Sequence[Turn], num_continued: int, bar: tqdm
) -> list[tuple[Turn, Generation, list[int]]]:
    """One response per turn, and the token ids that follow it past its stop."""
    if not turns:  # all of a round may be left out
        return []
    requests = [
        GenerationRequest(
            turn.prompt_ids,
            turn.max_tokens,
            turn.sampling.temperature,
            turn.sampling.seed,
            keep="" if num_continued else turn.dialogue.id,  # states are those of the whole sequence
        )
        for turn in turns
    ]
    generations = generator.generate(requests, bar)
    beyond: list[list[int]] = [[] for _ in turns]
    if num_continued:
        further = [
            GenerationRequest(
                [*turn.prompt_ids, *one.token_ids], num_continued, 0.0, 0, ignore_stop=True, keep=turn.dialogue.id
            )
            for turn, one in zip(turns, generations, strict=True)
        ]
        beyond = [one.token_ids for one in generator.generate(further)]
    return list(zip(turns, generations, beyond, strict=True))


def _ends(response: Response, message: ParsedResponse, drop: bool) -> str | None:
    """Why a conversation does not go on after this response."""
    if TRUNCATED in response.flags:
        return "cut off"
    if drop:
        return "dropped"
    if message.is_call:
        return "a tool call"
    return None if message.content.strip() else "no message to the user"


def flags_of(
    settings: ResponsesConfig, response: ParsedResponse, token_ids: Sequence[int], finish_reason: str
) -> list[str]:
    """What is wrong with a response, in the order of FLAGS.

    Truncation is the engine's word. A refusal begins with one of responses.refusal_openings: cheap, and it misses
    refusals that begin otherwise. Loops are told by `data.responses`, whose limit honest tables and code can reach too.
    """
    found = {
        TRUNCATED: finish_reason == "length",
        REFUSED: is_refusal(response.content, settings.refusal_openings),
        LOOPING: loops(token_ids),
    }
    return [flag for flag in FLAGS if found[flag]]


def is_refusal(text: str, openings: Sequence[str]) -> bool:
    """Whether a text begins with one of the openings, whatever its case, quotation marks and spaces."""
    begins = _plain(text[:200])
    return any(begins.startswith(_plain(opening)) for opening in openings)


def _plain(text: str) -> str:
    return " ".join(text.translate(_QUOTES).casefold().split())
