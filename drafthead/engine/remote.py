"""The target behind a URL: a vLLM server that takes token ids and gives token ids.

Requests go to /v1/completions with `return_token_ids`, which vLLM has since 0.10.2; the chat route would render the
conversation itself. A server that does not give ids is refused, because tokenising its text again can differ from
what the model said (several token sequences have one text), and the head would learn tokens the target never chose.
At the start one short answer is asked for and compared with this target's tokenizer, so a server of another model
is found before hours are spent; that its weights are the recipe's, only the harvest can see.

The key is read from the environment and goes nowhere else. Every sampling parameter is sent, since a server fills in
the others from the model's own generation_config.json. At most engine.max_num_seqs requests are under way.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import openai
from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.engine.answering import Answer, Answerer, Ask
from drafthead.engine.server import ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from transformers import PreTrainedTokenizerBase

KEY_VARIABLE = "DRAFTHEAD_API_KEY"
_RETRIES = (
    8  # waits of 0.5 s, doubling up to 8 s, forty seconds in all: enough for a proxy to restart, not for an engine
)
_TIMEOUT = openai.Timeout(3600.0, connect=10.0)  # an answer of many thousand tokens under load takes long
_T = TypeVar("_T")


@contextmanager
def server_answerer(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Answerer]:
    """The server at responses.server_url, after one answer showed that it can be used.

    Raises:
        ServerError: it cannot be reached, asks for another key, serves another model, or gives no token ids.
    """
    remote = _Remote(recipe)
    remote.check(tokenizer, recipe.engine.max_model_len)
    yield remote


class _Remote:
    def __init__(self, recipe: Recipe):
        assert recipe.responses.server_url is not None
        self._url = api_url(recipe.responses.server_url)
        self._model = recipe.responses.server_model or ""
        self._concurrency = recipe.engine.max_num_seqs
        self.made_by: dict[str, Any] = {}

    def answer(self, asks: Sequence[Ask], bar: tqdm | None = None) -> list[Answer]:
        """Raises ServerError when the server fails for longer than the retries last, or refuses."""

        async def all_of_them(client: openai.AsyncOpenAI) -> list[Answer]:
            slots = asyncio.Semaphore(self._concurrency)

            async def one(ask: Ask) -> Answer:
                async with slots:
                    answer, _ = await self._complete(client, ask)
                if bar is not None:
                    bar.update(1)
                return answer

            return await asyncio.gather(*(one(ask) for ask in asks))

        return self._run(all_of_them)

    def forget(self) -> None:
        """Another's server keeps its cache: others may be using it."""

    def check(self, tokenizer: "PreTrainedTokenizerBase", max_model_len: int) -> None:
        """Find the model's name, and see that it answers in this tokenizer's ids."""

        async def probe(client: openai.AsyncOpenAI) -> None:
            served = [model async for model in client.models.list()]
            self._model = self._model or self._only([model.id for model in served])
            card = next((model for model in served if model.id == self._model), None)
            room = getattr(card, "max_model_len", None)
            if room is not None and room < max_model_len:
                raise ServerError(
                    f"{self._url} serves {self._model} with max_model_len {room}, but engine.max_model_len is "
                    f"{max_model_len}: start it with --max-model-len {max_model_len}, or lower the recipe's"
                )
            self.made_by = {"server": self._url, "model": self._model, "root": getattr(card, "root", None)}
            ids = list(tokenizer("The quick brown fox", add_special_tokens=False)["input_ids"])
            answer, text = await self._complete(client, Ask(ids, 16, 0.0, 0))
            self._check_tokenizer(tokenizer, answer, text)

        self._run(probe)

    def _only(self, names: list[str]) -> str:
        if len(names) != 1:
            raise ServerError(
                f"{self._url} serves {len(names)} models ({', '.join(sorted(names))}): name the target's in "
                "responses.server_model"
            )
        return names[0]

    def _check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase", answer: Answer, text: str) -> None:
        ids = answer.token_ids
        ours = [str(tokenizer.decode(part, skip_special_tokens=False)) for part in (ids, ids[:-1])]  # with the stop?
        if max(ids) >= len(tokenizer) or text.rstrip("�") not in [own.rstrip("�") for own in ours]:
            raise ServerError(
                f"{self._url} serves {self._model} with another tokenizer: it says {text!r} where the ids {ids} mean "
                f"{ours[0]!r} to the recipe's target; start it with the model of target.path"
            )

    async def _complete(self, client: openai.AsyncOpenAI, ask: Ask) -> tuple[Answer, str]:
        completion = await client.completions.create(
            model=self._model,
            prompt=ask.prompt_ids,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            top_p=1.0,
            seed=ask.seed,
            extra_body={**_PLAIN_SAMPLING, "ignore_eos": ask.ignore_stop},
        )
        choice: Any = completion.choices[0]
        token_ids, prompt_ids = getattr(choice, "token_ids", None), getattr(choice, "prompt_token_ids", None)
        if not token_ids or prompt_ids is None:
            raise ServerError(
                f"{self._url} gives text but no token ids, and tokenising text again need not give the tokens that "
                "were said: use vLLM 0.10.2 or later (its field return_token_ids), or leave responses.server_url out "
                "and let an engine of our own answer"
            )
        if prompt_ids != ask.prompt_ids:
            raise ServerError(
                f"{self._url} read {len(prompt_ids)} tokens where {len(ask.prompt_ids)} were sent: something between "
                "here and the engine changes prompts; ask the engine directly"
            )
        if choice.finish_reason not in ("stop", "length"):
            raise ServerError(f"{self._url} ended an answer with {choice.finish_reason!r}, not with stop or length")
        return Answer(list(token_ids), choice.finish_reason), choice.text

    def _run(self, work: "Callable[[openai.AsyncOpenAI], Awaitable[_T]]") -> _T:
        async def with_client() -> _T:
            # A server without a key takes any; the client insists on one.
            key = os.environ.get(KEY_VARIABLE) or "none"
            async with openai.AsyncOpenAI(
                base_url=self._url, api_key=key, max_retries=_RETRIES, timeout=_TIMEOUT
            ) as client:
                return await work(client)

        try:
            return asyncio.run(with_client())
        except openai.APIConnectionError as error:
            raise ServerError(
                f"responses.server_url {self._url} did not answer {_RETRIES + 1} times in a row "
                f"({error.__cause__ or error}): start the server or correct the "
                "URL; finished parts are kept, the same command continues"
            ) from error
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            given = "it refuses the key in" if os.environ.get(KEY_VARIABLE) else "it wants a key: put it into"
            raise ServerError(f"{self._url}: {given} the environment variable {KEY_VARIABLE}") from error
        except openai.APIStatusError as error:
            raise ServerError(
                f"{self._url} answered {error.status_code} for model {self._model!r}: {error.response.text[:300]}"
            ) from error


# top_k 0 and min_p 0 are off; text is asked for as it is, control tokens included.
_PLAIN_SAMPLING = {
    "return_token_ids": True,
    "add_special_tokens": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def api_url(url: str) -> str:
    """With the /v1 that clients of this protocol expect, whether or not it was written."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"
