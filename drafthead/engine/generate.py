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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import openai
from tqdm import tqdm

from drafthead.engine.offline import generate
from drafthead.engine.server import ServerError
from drafthead.progress import wait_until

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM

KEY_VARIABLE = "DRAFTHEAD_API_KEY"
_RETRIES = 8  # with waits of 0.5 s, doubling up to 8 s: forty seconds, enough for a proxy to restart
_TIMEOUT = openai.Timeout(3600.0, connect=10.0)  # a response of many thousand tokens under load takes long
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


class EngineGenerator:
    """vLLM's engine in this process.

    Attributes:
        keeps_states: of the responses, for the store.
        made_by: what generates, for the manifest.
    """

    keeps_states = False

    def __init__(self, llm: "LLM"):
        self._llm = llm
        self.made_by: dict[str, Any] = {"engine": "vLLM in this process"}

    def reset_cache(self) -> None:
        """Drop cached prefixes, so that what follows does not depend on earlier requests.

        In bf16 a prefix from the cache and one computed in a batch round differently: a resumed stage would generate
        other tokens than an undisturbed one. An engine that keeps states caches no prefix.
        """
        if not self.keeps_states:
            wait_until(self._llm.reset_prefix_cache, "vLLM to reset its prefix cache")

    def generate(self, requests: Sequence[GenerationRequest], bar: tqdm | None = None) -> list[Generation]:
        """One generation per request, in their order; `bar` advances by one for each."""
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


class ServerGenerator:
    """A vLLM server by its URL."""

    def __init__(self, url: str, names: Sequence[str], concurrency: int, tokenizer: "PreTrainedTokenizerBase"):
        """Find the model's name, and check that the server generates this tokenizer's ids.

        Args:
            url: responses.server_url.
            names: under which the target may be served beside other models.
            concurrency: requests at a time.
            tokenizer: of the target.

        Raises:
            ServerError: it cannot be reached, refuses the key, serves another model, or returns no token ids.
        """
        self._url, self._concurrency = api_url(url), concurrency
        # A server without a key accepts any; the client insists on one.
        key = os.environ.get(KEY_VARIABLE) or "none"
        self._options: dict[str, Any] = {
            "base_url": self._url, "api_key": key, "max_retries": _RETRIES, "timeout": _TIMEOUT,
        }  # fmt: skip
        with self._readable_errors(), openai.OpenAI(**self._options) as client:
            cards = {model.id: model for model in client.models.list()}
        self._model = next((name for name in (cards if len(cards) == 1 else names) if name in cards), "")
        if not self._model:
            raise ServerError(
                f"{self._url} serves {len(cards)} models ({', '.join(sorted(cards))}), none of them named as the "
                f"target; start it with --served-model-name {names[0]}"
            )
        root = getattr(cards[self._model], "root", None)
        self.made_by = {"server": self._url, "model": self._model, "root": root}
        prompt_ids = list(tokenizer("The quick brown fox", add_special_tokens=False)["input_ids"])
        [(generation, text)] = self._complete_all([GenerationRequest(prompt_ids, 16, 0.0, 0)])
        ids = generation.token_ids
        ours = [str(tokenizer.decode(part, skip_special_tokens=False)) for part in (ids, ids[:-1])]  # with the stop?
        if max(ids) >= len(tokenizer) or text.rstrip("\ufffd") not in [own.rstrip("\ufffd") for own in ours]:
            raise ServerError(
                f"{self._url} serves {self._model} with another tokenizer: it generates {text!r} where the ids {ids} "
                f"mean {ours[0]!r} to the recipe's target; start it with the model of target.path"
            )

    def reset_cache(self) -> None:
        """Nothing: others may be using the server's cache."""

    def generate(self, requests: Sequence[GenerationRequest], bar: tqdm | None = None) -> list[Generation]:
        """As `EngineGenerator`.

        Raises:
            ServerError: the server fails for longer than the retries last, or refuses a request.
        """
        return [generation for generation, _ in self._complete_all(requests, bar)]

    def _complete_all(
        self, requests: Sequence[GenerationRequest], bar: tqdm | None = None
    ) -> list[tuple[Generation, str]]:
        """Generations and the server's text for each, in the order of the requests."""

        async def run() -> list[tuple[Generation, str]]:
            slots = asyncio.Semaphore(self._concurrency)
            async with openai.AsyncOpenAI(**self._options) as client:

                async def complete(request: GenerationRequest) -> tuple[Generation, str]:
                    async with slots:
                        completed = await self._complete(client, request)
                    if bar is not None:
                        bar.update(1)
                    return completed

                return await asyncio.gather(*map(complete, requests))

        with self._readable_errors():
            return asyncio.run(run())

    async def _complete(self, client: openai.AsyncOpenAI, request: GenerationRequest) -> tuple[Generation, str]:
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

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except openai.APIError as error:
            what = f"did not answer ({error.__cause__ or error})"
            if isinstance(error, openai.APIStatusError):
                what = f"answered {error.status_code}: {error.response.text[:300]}"
            advice = (
                f"put its key into the environment variable {KEY_VARIABLE}"
                if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError)
                else "start the server or correct the URL"
            )
            raise ServerError(
                f"responses.server_url {self._url} {what}; {advice}. Finished parts are "
                "kept, the same command continues"
            ) from error


Generator = EngineGenerator | ServerGenerator


def api_url(url: str) -> str:
    """The URL with the /v1 that clients of this protocol expect, whether or not it was written."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"
