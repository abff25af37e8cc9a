"""Conversations generated turn by turn: the prompt of each turn, its response, and what is wrong with that.

Each response is one stored sequence: the prompt as the engine read it, then the response. A later turn's prompt is
rendered anew from the messages, as a server does it, and is not the tokens of the turns before: Harmony drops the
analysis of earlier responses, other templates move or trim text. One sequence for the whole chat would therefore hold
tokens that no engine ever read in that place. What the exact form costs is that a chat's beginning is stored, and its
states are harvested, once per turn.

A round of turns is one batch for the engine: each conversation is a generator, which yields a request and waits for the
response while the others do (`make_responses`). Responses that the data has take the same form.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

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
# How refusals begin in the words of public chat models; compared without case, with straight apostrophes.
REFUSALS = (
    "i'm sorry, but i can",  # can't, cannot, can not
    "i'm sorry, i can",
    "sorry, but i can",
    "sorry, i can",
    "i can't help with",
    "i can't assist with",
    "i cannot help with",
    "i cannot assist with",
    "i'm unable to help",
    "i'm unable to assist",
    "i am unable to",
    "i won't help",
)
GIVEN, LENGTH = "given", "length"  # finish_reason of a response that the data had, and of one that was cut off
_PAST_STOP = 16  # tokens
DROPPED = "dropped"  # the reason why a response with a flag is missing
ENDED = "an earlier answer of the conversation was "  # as it is stored in the parts


def turns_of(prompt: Prompt, turn_by_turn: bool) -> list[tuple[Message, ...]]:
    """What a conversation adds before each response that it gets: all of the prompt, or turn by turn.

    The turns of  s u1 a1 u2 a2 a3 u3  are  [s u1] [u2] [u3]. What comes before the user's first message stays there.
    Tool results belong to the calls that were made, so a conversation with tools in it keeps its history.
    """
    used_tools = any(m["role"] == "tool" or m.get("tool_calls") for m in prompt.messages)
    if prompt.prompt_ids is not None or used_tools or not turn_by_turn:
        return [prompt.messages]
    begin = next(i for i, m in enumerate(prompt.messages) if m["role"] == "user")
    runs = groupby(prompt.messages[begin:], lambda m: m["role"] == "assistant")
    first, *later = [tuple(run) for is_response, run in runs if not is_response]
    return [(*prompt.messages[:begin], *first), *later]


def continuation(head: HeadConfig, split: str) -> int:
    """Tokens generated past the stop where acceptance is replayed, because vLLM counts before it trims: K at least.

    Enough for other heads as well that are trained on the same states.
    """
    return max(head.num_positions, _PAST_STOP) if split == "validation" else 0


class SplitRules:
    """How the prompts of one split get their responses.

    Attributes:
        settings, max_model_len, seed: responses section, longest sequence and seed of the recipe.
        tokenizer: tokenizer of the target.
        render: renders prompts to token ids, with the target's tokenizer.
        read: parses the token ids of a response into its message.
        data_responses: renders responses that the data has; None: the target generates all.
        continuation: number of tokens generated past the stop; a split that has them is generated greedily.
    """

    def __init__(self, recipe: Recipe, split: str, tokenizer: "PreTrainedTokenizerBase"):
        self.settings, self.max_model_len, self.tokenizer = recipe.responses, recipe.engine.max_model_len, tokenizer
        self.seed = recipe.prompts.seed
        self.render, self.read = rendering.renderer(recipe, tokenizer), rendering.response_parser(tokenizer)
        keeps = not recipe.responses.regenerates(split)
        self.data_responses = (
            rendering.KeptResponses(self.render, tokenizer, stop_tokens(recipe, tokenizer)) if keeps else None
        )
        self.continuation = continuation(recipe.head, split)


class Sampling(NamedTuple):
    """How one response is sampled."""

    temperature: float
    effort: Effort
    seed: int


def draw_sampling(settings: ResponsesConfig, seed: int, prompt_id: str, turn: int, greedy: bool) -> Sampling:
    """Temperature and reasoning effort of a conversation, and the sampling seed of one of its turns.

    They follow from `seed`, which is prompts.seed, and the prompt's id alone, the sampling seed from the turn too.
    """
    number = _number(seed, prompt_id)
    of_turn = number if turn == 0 else _number(seed, prompt_id, turn)
    temperature = _weighted(settings.temperatures, _number(seed, "temperature", prompt_id))
    return Sampling(0.0 if greedy else temperature, _weighted(settings.efforts, number), (of_turn >> 8) % 2**31)


def _number(*key: int | str) -> int:
    return int(digest(list(key))[:12], 16)


def _weighted(weights: Mapping[_T, int], number: int) -> _T:
    """The value on which a large number falls, modulo the sum of the weights."""
    place = number % sum(weights.values())
    return next(value for value, end in zip(weights, accumulate(weights.values()), strict=True) if place < end)


def make_responses(
    rules: SplitRules, generator: Engine | None, prompts: Sequence[Prompt], bar: tqdm
) -> tuple[list[Response], list[LeftOut]]:
    """Responses to every turn of the prompts, in their order, and what is missing among them.

    All first turns are one batch for the engine, then all second ones, and so on. Given up: a full batch at the end of
    each round, where the longest responses run alone; large parts make that rare.

    Args:
        rules: rules of the split.
        generator: runs the target; None where the responses are given. What that gives up: the text is not the
            target's own, so the head learns to follow the target along paths that the target would not take.
        prompts: prompts of one part.
        bar: progress bar, advanced by the number of turns in `prompts`.
    """
    responses: list[list[Response]] = [[] for _ in prompts]
    left_out: list[LeftOut] = []
    open_ones = [
        converse(rules, prompt, prompt_responses, left_out, bar)
        for prompt, prompt_responses in zip(prompts, responses, strict=True)
    ]
    generated_responses: list[Any] = [None] * len(open_ones)  # what begins a generator
    while open_ones:
        requests = {}
        for conversation, generated in zip(open_ones, generated_responses, strict=True):
            with suppress(StopIteration):  # it has ended
                requests[conversation] = conversation.send(generated)
        open_ones = list(requests)
        generated_responses = _generate(generator, list(requests.values()), rules.continuation, bar)
    return list(chain.from_iterable(responses)), left_out


GeneratedResponse = tuple[Generation, list[int]]  # a response, and the token ids that follow it past its stop
Conversation = Generator[GenerationRequest, GeneratedResponse, None]


def converse(
    rules: SplitRules, prompt: Prompt, responses: list[Response], left_out: list[LeftOut], bar: tqdm
) -> Conversation:
    """One conversation: yields the request for each response, and is sent what was made of it.

    It ends early when a prompt cannot have a response, or when a response was cut off, is no message to the user, or
    was dropped: a later turn on top of something else would not be what a server sees. Its further turns are counted.
    """
    turns = turns_of(prompt, rules.settings.turn_by_turn)
    names = [prompt.id] if len(turns) == 1 else [f"{prompt.id}-{number}" for number in range(1, len(turns) + 1)]
    history: tuple[Message, ...] = ()
    for turn, messages in enumerate(turns):
        history, turns_left = (*history, *messages), len(turns) - turn
        sampling = draw_sampling(rules.settings, rules.seed, prompt.id, turn, greedy=bool(rules.continuation))
        try:
            request, stored = _prepare(rules, replace(prompt, messages=history), names[turn], sampling)
        except UnrenderableError as error:
            left_out.append(LeftOut(names[turn], prompt.category, error.reason, turns=turns_left))
            bar.update(turns_left)
            return
        if stored is None:
            generation, beyond = yield request
        else:
            generation, beyond = stored, []
            bar.update(1)
        message = rules.read(generation.token_ids)
        response = Response(
            id=names[turn],
            category=prompt.category,
            prompt_ids=request.prompt_ids,
            response_ids=generation.token_ids,
            continuation_ids=beyond,
            text=str(rules.tokenizer.decode(generation.token_ids, skip_special_tokens=False)),
            finish_reason=generation.finish_reason,
            temperature=None if stored else sampling.temperature,
            reasoning_effort=sampling.effort,
            seed=None if stored else sampling.seed,
            turn=turn,
            flags=flags_of(message, generation),
        )
        drop = rules.settings.drops(response.flags)
        if drop:
            left_out.append(LeftOut(response.id, prompt.category, DROPPED, response.flags))
        else:
            responses.append(response)
        if turns_left > 1 and (why := _ends(response, message, drop)):
            left_out.append(LeftOut(names[turn + 1], prompt.category, ENDED + why, turns=turns_left - 1))
            bar.update(turns_left - 1)
            return
        # As a client sends it back: without the thought.
        history = (*history, {"role": "assistant", "content": message.content})


def _prepare(
    rules: SplitRules, prompt: Prompt, name: str, sampling: Sampling
) -> tuple[GenerationRequest, Generation | None]:
    """The request for a response, and the response where the data has it; raises UnrenderableError."""
    prompt_ids = rules.render(prompt, sampling.effort)
    response = None
    if rules.data_responses:
        ids = rules.data_responses(prompt, prompt_ids, sampling.effort)
        response = Generation(ids, GIVEN if rules.data_responses.ends(ids) else LENGTH)
    # One token stays free: an engine never reads its own last token, and the harvest generates one more.
    room = rules.max_model_len - 1 - len(prompt_ids) - rules.continuation
    if room < (len(response.token_ids) if response else 1):
        raise UnrenderableError(NO_ROOM, prompt.id)
    max_tokens = min(room, rules.settings.max_tokens)
    return GenerationRequest(prompt_ids, max_tokens, sampling.temperature, sampling.seed, keep=name), response


def _generate(
    generator: Engine | None, requests: Sequence[GenerationRequest], continuation: int, bar: tqdm
) -> list[GeneratedResponse]:
    """One response per request, and the token ids that follow it past its stop."""
    if generator is None or not requests:  # responses of the data are not asked for
        return []
    if not continuation:
        return [(generation, []) for generation in generator.generate(requests, bar)]
    # The states that are kept are those of the whole sequence.
    generations = generator.generate([replace(request, keep="") for request in requests], bar)
    further = [
        GenerationRequest(
            [*request.prompt_ids, *generation.token_ids], continuation, 0.0, 0, ignore_stop=True, keep=request.keep
        )
        for request, generation in zip(requests, generations, strict=True)
    ]
    return [
        (generation, beyond.token_ids)
        for generation, beyond in zip(generations, generator.generate(further), strict=True)
    ]


def _ends(response: Response, message: ParsedResponse, drop: bool) -> str | None:
    """Why a conversation does not go on after this response."""
    if TRUNCATED in response.flags:
        return "cut off"
    if drop:
        return "dropped"
    if message.is_call:
        return "a tool call"
    return None if message.content.strip() else "no message to the user"


def flags_of(message: ParsedResponse, generation: Generation) -> list[str]:
    """What is wrong with a response, in the order of FLAGS.

    Truncation is the engine's word, or that a response of the data ends without a stop token. A refusal begins with one
    of REFUSALS: cheap, and it misses refusals that begin otherwise. Loops are told by `data.responses`, whose limit
    honest tables and code can reach too.
    """
    straight = message.content[:200].replace("\u2019", "'").replace("\u2018", "'")
    applies = {
        TRUNCATED: generation.finish_reason == LENGTH,
        REFUSED: " ".join(straight.casefold().split()).startswith(REFUSALS),
        LOOPING: loops(generation.token_ids),
    }
    return [flag for flag in FLAGS if applies[flag]]
