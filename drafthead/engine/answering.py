"""Token ids in, token ids out: what regeneration needs of whoever runs the target.

Two things do: vLLM's engine in this process (below), and a vLLM server by its URL (serving.remote). Both get the
prompt as token ids and give back the ids they generated, the stop token included, so neither a chat template nor a
tokenizer lies between what is stored and what was said.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from drafthead.config import Recipe

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Ask:
    """One prompt to continue.

    Attributes:
        prompt_ids: what the target reads.
        max_tokens: where it is cut off.
        temperature: 0 is greedy.
        seed: of the sampling.
        ignore_stop: run on past stop tokens.
        keep: where states are captured, the name under which those of prompt and answer are kept; "" keeps none.
    """

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    ignore_stop: bool = False
    keep: str = ""


@dataclass(frozen=True)
class Answer:
    """What the target said: ids with the stop token, and "stop" or "length"."""

    token_ids: list[int]
    finish_reason: str


class Answerer(Protocol):
    """Something that runs the target.

    Attributes:
        made_by: what it is, for the manifest.
    """

    made_by: dict[str, Any]

    def answer(self, asks: Sequence[Ask], bar: tqdm | None = None) -> list[Answer]:
        """Answers in the order of the prompts; `bar` advances by one per answer."""

    def forget(self) -> None:
        """Drop what is cached of earlier prompts, so that the next answers do not depend on them, if that can be done.

        A prefix from the cache and one computed in a batch round differently in bf16: a resumed stage would say
        something else than an undisturbed one.
        """


class EngineAnswerer:
    """vLLM's engine in this process."""

    keeps_states = False

    def __init__(self, llm: "LLM"):
        self._llm = llm
        self.made_by = {"engine": "vLLM in this process"}

    def forget(self) -> None:
        """Compute the beginnings of prompts anew: what was answered before has no part in what comes."""
        self._llm.reset_prefix_cache()

    def answer(self, asks: Sequence[Ask], bar: tqdm | None = None) -> list[Answer]:
        """Answers in the order of the prompts; `bar` advances by one per answer."""
        from vllm import SamplingParams

        from drafthead.engine.offline import generate

        params = [
            SamplingParams(
                temperature=ask.temperature,
                seed=ask.seed,
                max_tokens=ask.max_tokens,
                ignore_eos=ask.ignore_stop,
                detokenize=False,
                extra_args={"kv_transfer_params": {"keep": ask.keep}} if self.keeps_states and ask.keep else None,
            )
            for ask in asks
        ]
        outputs = [output.outputs[0] for output in generate(self._llm, [ask.prompt_ids for ask in asks], params, bar)]
        return [Answer(list(output.token_ids), str(output.finish_reason)) for output in outputs]


@contextmanager
def engine_answerer(recipe: Recipe) -> Iterator[Answerer]:
    """The recipe's target in an engine of this process, which is gone when the block ends."""
    from drafthead.engine.offline import offline_engine  # vLLM takes seconds to import

    with offline_engine(recipe, seeded=True, disable_log_stats=True) as llm:
        yield EngineAnswerer(llm)
