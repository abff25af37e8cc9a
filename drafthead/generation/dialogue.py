"""Conversations generated turn by turn: the prompt of each turn, its response, and what is wrong with that.

Each response is one stored sequence: the prompt as the engine read it, then the response. A later turn's prompt is
rendered anew from the messages, as a server does it, and is not the tokens of the turns before: Harmony drops the
analysis of earlier responses, other templates move or trim text. One sequence for the whole chat would therefore hold
tokens that no engine ever read in that place. What the exact form costs is that a chat's beginning is stored, and its
states are harvested, once per turn.

A round of turns is one batch for the engine, see `make_responses`. Responses that the data has take the same form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, NamedTuple, TypeVar, get_args

from tqdm import tqdm

from drafthead.artifacts import digest
from drafthead.config import Recipe
from drafthead.config.evaluation import Effort
from drafthead.config.recipe import Fault, ResponsesConfig
from drafthead.data import rendering
from drafthead.data.prompts import Message, Prompt
from drafthead.data.rendering import NO_ROOM, ParsedResponse, UnrenderableError
from drafthead.data.responses import LeftOut, Response, loops
from drafthead.drafters.config import HeadConfig
from drafthead.engine.generate import Engine, Generation, GenerationRequest
from drafthead.target.tokenizer import stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_T = TypeVar("_T")

TRUNCATED, REFUSED, LOOPING = FLAGS = get_args(Fault)
GIVEN, LENGTH = "given", "length"  # finish_reason of a response that the data had, and of one that was cut off
_PAST_STOP = 16  # tokens
DROPPED = "dropped"  # the reason why a response with a flag is missing
ENDED = "an earlier answer of the conversation was "  # as it is stored in the parts


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
        said = {"role": "assistant", "content": response.content}  # as a client sends it back: without the thought
        history = (*self.messages, said, *self.later[0])
        return replace(self, messages=history, later=self.later[1:], turn=self.turn + 1)


def open_dialogue(prompt: Prompt, turn_by_turn: bool) -> Dialogue:
    """A conversation at its first turn, or at its last one with the history of the data.

    The turns of  s u1 a1 u2 a2 a3 u3  are  [s u1] [u2] [u3]. What comes before the user's first message stays there.
    Tool results belong to the calls that were made, so a conversation with tools in it keeps its history.
    """
    used_tools = any(m["role"] == "tool" or m.get("tool_calls") for m in prompt.messages)
    if prompt.prompt_ids is not None or used_tools or not turn_by_turn:
        return Dialogue(prompt, prompt.messages)
    begin = next(i for i, m in enumerate(prompt.messages) if m["role"] == "user")
    runs = groupby(prompt.messages[begin:], lambda m: m["role"] == "assistant")
    first, *later = [tuple(run) for is_response, run in runs if not is_response]
    return Dialogue(prompt, (*prompt.messages[:begin], *first), tuple(later))


def continuation(head: HeadConfig, split: str) -> int:
    """Tokens generated past the stop where acceptance is replayed, because vLLM counts before it trims: K at least.

    Enough for other heads as well that are trained on the same states.
    """
    return max(head.num_positions, _PAST_STOP) if split == "validation" else 0


class SplitRules:
    """How the prompts of one split get their responses.

    Attributes:
        settings, max_model_len: of the recipe.
        tokenizer: of the target.
        render: prompts to token ids, with the target's tokenizer.
        read: a response's token ids to its message.
        given: the responses of the data, where they are kept; None: the target generates all.
        greedy: whatever the settings say; validation is.
        continuation: tokens generated past the stop.
    """

    def __init__(self, recipe: Recipe, split: str, tokenizer: "PreTrainedTokenizerBase"):
        self.settings, self.max_model_len, self.tokenizer = recipe.responses, recipe.engine.max_model_len, tokenizer
        self.render, self.read = rendering.renderer(recipe, tokenizer), rendering.response_parser(tokenizer)
        keeps = not recipe.responses.regenerates(split)
        self.given = rendering.KeptResponses(self.render, tokenizer, stop_tokens(recipe, tokenizer)) if keeps else None
        self.greedy, self.continuation = split == "validation", continuation(recipe.head, split)


class Sampling(NamedTuple):
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
    return next(value for value, end in zip(weights, accumulate(weights.values()), strict=True) if place < end)


@dataclass(frozen=True)
class Turn:
    """One turn as the target gets it.

    Attributes:
        dialogue: up to this turn.
        effort: drawn for it; the template writes it into the prompt.
        request: for its response.
        given: the response of the data; None: it is generated.
    """

    dialogue: Dialogue
    effort: Effort
    request: GenerationRequest
    given: list[int] | None


def prepare(rules: SplitRules, dialogues: Sequence[Dialogue]) -> tuple[list[Turn], list[LeftOut]]:
    """Render the next turn of each dialogue; those that cannot have a response come back with a reason."""
    turns: list[Turn] = []
    left_out: list[LeftOut] = []
    for dialogue in dialogues:
        prompt = replace(dialogue.prompt, messages=dialogue.messages)
        sampling = draw_sampling(rules.settings, prompt.id, dialogue.turn, rules.greedy)
        try:
            prompt_ids = rules.render(prompt, sampling.effort)
            given = rules.given(prompt, prompt_ids, sampling.effort) if rules.given else None
            # One token stays free: an engine never reads its own last token, and the harvest generates one more.
            room = rules.max_model_len - 1 - len(prompt_ids) - rules.continuation
            if room < len(given or [0]):
                raise UnrenderableError(NO_ROOM, prompt.id)
        except UnrenderableError as error:
            left_out.append(LeftOut(dialogue.id, prompt.category, error.reason, turns=dialogue.turns_left))
            continue
        keep = "" if rules.continuation else dialogue.id  # states are those of the whole sequence
        max_tokens = min(room, rules.settings.max_tokens)
        request = GenerationRequest(prompt_ids, max_tokens, sampling.temperature, sampling.seed, keep=keep)
        turns.append(Turn(dialogue, sampling.effort, request, given))
    return turns, left_out


def make_responses(
    rules: SplitRules, generator: Engine | None, prompts: Sequence[Prompt], bar: tqdm
) -> tuple[list[Response], list[LeftOut]]:
    """Responses to every turn of the prompts, in their order, and what is missing among them.

    All first turns are one batch for the engine, then all second ones, and so on. Given up: a full batch at the end of
    each round, where the longest responses run alone; large parts make that rare. A conversation ends early when its
    response was cut off, is no message to the user, or was dropped: a later turn on top of something else would not be
    what a server sees. Its further turns are counted.

    Args:
        rules: of the split.
        generator: runs the target; None where the responses are given. What that gives up: the text is not the
            target's own, so the head learns to follow the target along paths that the target would not take.
        prompts: of a part.
        bar: advances by the number of turns in `prompts`.
    """
    responses: dict[str, list[Response]] = {prompt.id: [] for prompt in prompts}
    left_out: list[LeftOut] = []
    dialogues = [open_dialogue(prompt, rules.settings.turn_by_turn) for prompt in prompts]
    while dialogues:
        turns, lost = prepare(rules, dialogues)
        dialogues = []
        for turn, (generation, beyond) in zip(turns, _generate(rules, generator, turns, bar), strict=True):
            dialogue, message, was_given = turn.dialogue, rules.read(generation.token_ids), turn.given is not None
            response = Response(
                id=dialogue.id,
                category=dialogue.prompt.category,
                prompt_ids=turn.request.prompt_ids,
                response_ids=generation.token_ids,
                continuation_ids=beyond,
                text=str(rules.tokenizer.decode(generation.token_ids, skip_special_tokens=False)),
                finish_reason=generation.finish_reason,
                temperature=None if was_given else turn.request.temperature,
                reasoning_effort=turn.effort,
                seed=None if was_given else turn.request.seed,
                turn=dialogue.turn,
                flags=flags_of(rules.settings, message, generation),
            )
            drop = rules.settings.drops(response.flags)
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
    rules: SplitRules, generator: Engine | None, turns: Sequence[Turn], bar: tqdm
) -> list[tuple[Generation, list[int]]]:
    """One response per turn, and the token ids that follow it past its stop."""
    if rules.given is not None:
        bar.update(len(turns))
        ended, given = rules.given.ends, [turn.given or [] for turn in turns]
        return [(Generation(ids, GIVEN if ended(ids) else LENGTH), []) for ids in given]
    if not turns or generator is None:  # all of a round may be left out
        return []
    generations = generator.generate([turn.request for turn in turns], bar)
    if not (K := rules.continuation):
        return [(one, []) for one in generations]
    further = [
        GenerationRequest(
            [*turn.request.prompt_ids, *one.token_ids], K, 0.0, 0, ignore_stop=True, keep=turn.dialogue.id
        )
        for turn, one in zip(turns, generations, strict=True)
    ]
    return [(one, beyond.token_ids) for one, beyond in zip(generations, generator.generate(further), strict=True)]


def _ends(response: Response, message: ParsedResponse, drop: bool) -> str | None:
    """Why a conversation does not go on after this response."""
    if TRUNCATED in response.flags:
        return "cut off"
    if drop:
        return "dropped"
    if message.is_call:
        return "a tool call"
    return None if message.content.strip() else "no message to the user"


def flags_of(settings: ResponsesConfig, message: ParsedResponse, generation: Generation) -> list[str]:
    """What is wrong with a response, in the order of FLAGS.

    Truncation is the engine's word, or that a response of the data ends without a stop token. A refusal begins with one
    of responses.refusal_openings: cheap, and it misses refusals that begin otherwise. Loops are told by
    `data.responses`, whose limit honest tables and code can reach too.
    """
    found = {
        TRUNCATED: generation.finish_reason == LENGTH,
        REFUSED: is_refusal(message.content, settings.refusal_openings),
        LOOPING: loops(generation.token_ids),
    }
    return [flag for flag in FLAGS if found[flag]]


def is_refusal(text: str, openings: Sequence[str]) -> bool:
    """Whether a text begins with one of the openings, whatever its case, quotation marks and spaces."""
    return _plain(text[:200]).startswith(tuple(map(_plain, openings)))


def _plain(text: str) -> str:
    return " ".join(text.replace("\u2019", "'").replace("\u2018", "'").casefold().split())
