"""Token ids in, token ids out: the two ways to generate with the target.

`EngineGenerator` runs vLLM in this process, `ServerGenerator` sends requests to a vLLM server by its URL. Both take
the prompt as token ids and return the ids that were generated, the stop token included: no chat template and no
tokenizer changes anything on the way.

Requests to a server go to /v1/completions with `return_token_ids`, which vLLM has since 0.10.2. A server that returns
text only is refused, because tokenising its text again can give other tokens than were generated. At the start one
short generation is compared with the target's tokenizer, which finds a server of another model; that its weights are
the recipe's, only the harvest can tell. The key is read from the environment and written nowhere.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import openai
from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.engine.offline import generate, offline_engine
from drafthead.engine.server import ServerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM

KEY_VARIABLE = "DRAFTHEAD_API_KEY"
_RETRIES = 8  # with waits of 0.5 s, doubling up to 8 s: forty seconds, enough for a proxy to restart
_TIMEOUT = openai.Timeout(3600.0, connect=10.0)  # a response of many thousand tokens under load takes long
_RESET_S = 30.0  # how long an engine may hold blocks of its prefix cache after the last response
_T = TypeVar("_T")


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        prompt_ids: token ids of the prompt.
        max_tokens: length limit of the response.
        temperature: 0 is greedy.
        seed: of the sampling.
        ignore_stop: generate past stop tokens.
        keep: where states are captured, the name under which those of this sequence are kept; "" keeps none.
    """

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    ignore_stop: bool = False
    keep: str = ""


@dataclass(frozen=True)
class Generation:
    """Generated token ids, stop token included, and why they end: "stop" or "length"."""

    token_ids: list[int]
    finish_reason: str


class Generator(Protocol):
    """Something that runs the target.

    Attributes:
        made_by: what it is, for the manifest.
    """

    made_by: dict[str, Any]

    def generate(self, requests: Sequence[GenerationRequest], bar: tqdm | None = None) -> list[Generation]:
        """One generation per request, in their order; `bar` advances by one for each."""

    def reset_cache(self) -> None:
        """Drop cached prefixes where that is possible, so that what follows does not depend on earlier requests.

        In bf16 a prefix from the cache and one computed in a batch round differently: a resumed stage would generate
        other tokens than an undisturbed one.
        """


class EngineGenerator:
    """vLLM's engine in this process."""

    keeps_states = False

    def __init__(self, llm: "LLM"):
        self._llm = llm
        self.made_by = {"engine": "vLLM in this process"}

    def reset_cache(self) -> None:
        """As in `Generator`.

        Raises:
            RuntimeError: the engine still holds cached blocks after half a minute.
        """
        deadline = time.monotonic() + _RESET_S
        # An engine that keeps states caches no prefix.
        while not self.keeps_states and not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not reset its prefix cache within {_RESET_S:.0f} s")
            time.sleep(0.1)

    def generate(self, requests: Sequence[GenerationRequest], bar: tqdm | None = None) -> list[Generation]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=request.temperature,
                seed=request.seed,
                max_tokens=request.max_tokens,
                ignore_eos=request.ignore_stop,
                detokenize=False,
                extra_args=(
                    {"kv_transfer_params": {"keep": request.keep}} if self.keeps_states and request.keep else None
                ),
            )
            for request in requests
        ]
        outputs = generate(self._llm, [request.prompt_ids for request in requests], params, bar)
        return [Generation(list(o.outputs[0].token_ids), str(o.outputs[0].finish_reason)) for o in outputs]


@contextmanager
def engine_generator(recipe: Recipe) -> Iterator[EngineGenerator]:
    """The recipe's target in an engine of this process, shut down when the block ends."""
    with offline_engine(recipe, seeded=True, disable_log_stats=True) as llm:
        yield EngineGenerator(llm)


class ServerGenerator:
    """The server at responses.server_url, at most engine.max_num_seqs requests at a time."""

    def __init__(self, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase"):
        """Find the model's name, and check that the server generates this tokenizer's ids.

        Raises:
            ServerError: it cannot be reached, refuses the key, serves another model, or returns no token ids.
        """
        assert recipe.responses.server_url is not None
        self._url = api_url(recipe.responses.server_url)
        self._model = ""
        self._concurrency = recipe.engine.max_num_seqs
        self.made_by: dict[str, Any] = {}
        self._run(lambda client: self._check(client, recipe, tokenizer))

    def generate(self, requests: Sequence[GenerationRequest], bar: tqdm | None = None) -> list[Generation]:
        """As in `Generator`.

        Raises:
            ServerError: the server fails for longer than the retries last, or refuses a request.
        """

        async def all_requests(client: openai.AsyncOpenAI) -> list[Generation]:
            slots = asyncio.Semaphore(self._concurrency)

            async def one(request: GenerationRequest) -> Generation:
                async with slots:
                    generation, _ = await self._complete(client, request)
                if bar is not None:
                    bar.update(1)
                return generation

            return await asyncio.gather(*map(one, requests))

        return self._run(all_requests)

    def reset_cache(self) -> None:
        """Nothing: others may be using the server's cache."""

    async def _check(self, client: openai.AsyncOpenAI, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> None:
        cards = {model.id: model async for model in client.models.list()}
        names = list(cards) if len(cards) == 1 else [n for n in (recipe.target.path, recipe.name) if n in cards]
        if not names:
            raise ServerError(
                f"{self._url} serves {len(cards)} models ({', '.join(sorted(cards))}), none of them named as "
                f"target.path {recipe.target.path}; start it with --served-model-name {recipe.name}"
            )
        self._model, wanted = names[0], recipe.engine.max_model_len
        room = getattr(cards[self._model], "max_model_len", None)
        if room is not None and room < wanted:
            raise ServerError(
                f"{self._url} serves {self._model} with max_model_len {room}, but engine.max_model_len is {wanted}: "
                f"start it with --max-model-len {wanted}, or lower the recipe's"
            )
        root = getattr(cards[self._model], "root", None)
        self.made_by = {"server": self._url, "model": self._model, "root": root}
        prompt_ids = list(tokenizer("The quick brown fox", add_special_tokens=False)["input_ids"])
        generation, text = await self._complete(client, GenerationRequest(prompt_ids, 16, 0.0, 0))
        ids = generation.token_ids
        ours = [str(tokenizer.decode(part, skip_special_tokens=False)) for part in (ids, ids[:-1])]  # with the stop?
        if max(ids) >= len(tokenizer) or text.rstrip("\ufffd") not in [own.rstrip("\ufffd") for own in ours]:
            raise ServerError(
                f"{self._url} serves {self._model} with another tokenizer: it generates {text!r} where the ids {ids} "
                f"mean {ours[0]!r} to the recipe's target; start it with the model of target.path"
            )

    async def _complete(self, client: openai.AsyncOpenAI, request: GenerationRequest) -> tuple[Generation, str]:
        """A generation, and the server's text for it."""
        completion = await client.completions.create(
            model=self._model,
            prompt=request.prompt_ids,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=1.0,
            seed=request.seed,
            extra_body={**_PLAIN_SAMPLING, "ignore_eos": request.ignore_stop},
        )
        choice: Any = completion.choices[0]
        token_ids, prompt_ids = getattr(choice, "token_ids", None), getattr(choice, "prompt_token_ids", None)
        if not token_ids or prompt_ids is None:
            raise ServerError(
                f"{self._url} returns text but no token ids, and tokenising text again need not give the tokens that "
                "were generated: use vLLM 0.10.2 or later (its field return_token_ids), or leave out "
                "responses.server_url to run an engine of our own"
            )
        if prompt_ids != request.prompt_ids:
            raise ServerError(
                f"{self._url} read {len(prompt_ids)} tokens where {len(request.prompt_ids)} were sent: a proxy in "
                "between changes prompts; give the URL of the engine itself"
            )
        if choice.finish_reason not in ("stop", "length"):
            raise ServerError(f"{self._url} ended a response with {choice.finish_reason!r}, not with stop or length")
        return Generation(list(token_ids), choice.finish_reason), choice.text

    def _run(self, work: Callable[[openai.AsyncOpenAI], Awaitable[_T]]) -> _T:
        key = os.environ.get(KEY_VARIABLE)

        async def with_client() -> _T:
            # A server without a key accepts any; the client insists on one.
            async with openai.AsyncOpenAI(
                base_url=self._url, api_key=key or "none", max_retries=_RETRIES, timeout=_TIMEOUT
            ) as client:
                return await work(client)

        try:
            return asyncio.run(with_client())
        except openai.APIConnectionError as error:
            raise ServerError(
                f"responses.server_url {self._url} did not answer {_RETRIES + 1} times in a row "
                f"({error.__cause__ or error}): start the server or correct the URL; finished parts are kept, the same "
                "command continues"
            ) from error
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            given = "refuses the key in" if key else "needs a key in"
            raise ServerError(f"{self._url} {given} the environment variable {KEY_VARIABLE}") from error
        except openai.APIStatusError as error:
            raise ServerError(
                f"{self._url} answered {error.status_code} for model {self._model!r}: {error.response.text[:300]}"
            ) from error


# Every sampling parameter is sent: a server fills in the others from the model's generation_config.json.
_PLAIN_SAMPLING = {
    "return_token_ids": True,
    "add_special_tokens": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "top_k": 0,  # off, as min_p 0
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def api_url(url: str) -> str:
    """The URL with the /v1 that clients of this protocol expect, whether or not it was written."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"
