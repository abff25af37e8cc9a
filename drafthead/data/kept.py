"""Answers that the data already has, as tokens: where the prompt ends and what the target would have generated.

Nothing here knows a template's markup. A conversation is rendered twice, up to the generation prompt and with the
answer, and the boundary is where the first one ends. That holds only if the first is a beginning of the second, token
by token, which is checked each time:

    up to the question  <|start|>user<|message|>Hi<|end|><|start|>assistant
    with the answer     <|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>
    response                                                             ^------------------------------------------^

The response ends with the first stop token; what a template writes after it, no engine would generate. Then the
response is read back: a template that trims, rewrites or drops the answer is found there. A tokenizer that merges
the last character before the boundary with the first after it fails the first check; so do templates whose earlier
part depends on what follows. A template that fails on ordinary text is refused as a whole; single answers that fail
are left out with a reason that callers count.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafthead.data.prompts import Prompt, prompt_id
from drafthead.data.reading import Said, answer_reader
from drafthead.data.rendering import Renderer, UnrenderableError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_ANSWER = "the data has no answer to the last message"
IS_CALL = "the answer is a tool call"
UNSTABLE = "the chat template gives no stable boundary between prompt and answer"
NO_STOP = "the chat template ends the answer with no stop token of the target"
ALTERED = "the chat template does not repeat the answer as it is"
_THOUGHT_KEYS = ("thinking", "reasoning_content", "reasoning")  # as gpt-oss, Qwen and others name it
_PROBES = ("Yes, of course.", "1. First", "```python\nprint()\n```", "*Note*", "{}", "é", "你好")


@dataclass(frozen=True)
class Kept:
    """An answer of the data as the engine would have produced it, stop token included."""

    prompt_ids: list[int]
    response_ids: list[int]
    said: Said


class KeptAnswers:
    """Splits rendered conversations into prompt and response."""

    def __init__(self, render: Renderer, tokenizer: "PreTrainedTokenizerBase", stop_ids: set[int]):
        """
        Args:
            render: of that tokenizer.
            tokenizer: with a chat template.
            stop_ids: tokens on which the target's generation ends.

        Raises:
            ValueError: the template gives no stable boundaries on ordinary text.
        """
        self._render, self._read, self._stops = render, answer_reader(tokenizer), stop_ids
        for answer in _PROBES:
            for turns in (1, 2):
                try:
                    self(_probe(answer, turns), "medium")
                except UnrenderableError as error:
                    raise ValueError(
                        f"responses.regenerate false needs a chat template whose boundaries are stable; this target's "
                        f"is not, tried with the answer {answer!r} in turn {turns}: {error}. Let the target answer "
                        "itself (responses.regenerate=true), which needs no boundaries"
                    ) from error

    def __call__(self, prompt: Prompt, effort: str) -> Kept:
        """Tokens of a prompt and its answer.

        Raises:
            UnrenderableError: there is no answer, or it has no tokens with a boundary.
        """
        answer = prompt.answer
        if answer is None or prompt.prompt_ids is not None:
            raise UnrenderableError(NO_ANSWER, prompt.id)
        if answer.get("tool_calls"):
            raise UnrenderableError(IS_CALL, prompt.id)
        before = self._render(prompt, effort)
        whole = self._render.answered(prompt, _with_thought(answer), effort)
        if whole[: len(before)] != before:
            differs = next(i for i in range(len(before)) if whole[i : i + 1] != before[i : i + 1])
            raise UnrenderableError(UNSTABLE, f"token {differs} of {len(before)} changes once the answer follows")
        rest = whole[len(before) :]
        end = next((i for i, token in enumerate(rest) if token in self._stops), None)
        if end is None:
            raise UnrenderableError(NO_STOP, f"found none of {sorted(self._stops)} in the last tokens {rest[-4:]}")
        response = rest[: end + 1]
        said = self._read(response)
        for wanted, found in ((answer["content"], said.content), (answer.get("thinking"), said.thinking)):
            if wanted is not None and wanted.strip() != found.strip():
                raise UnrenderableError(ALTERED, f"{wanted[:60]!r} became {found[:60]!r}")
        return Kept(before, response, said)


def _with_thought(answer: dict[str, Any]) -> dict[str, Any]:
    """The message under every name that templates know for a thought."""
    thought = answer.get("thinking")
    return {"role": "assistant", "content": answer["content"], **(dict.fromkeys(_THOUGHT_KEYS, thought) if thought else {})}


def _probe(answer: str, turns: int) -> Prompt:
    asked: tuple[dict[str, Any], ...] = ({"role": "user", "content": "Is it?"},)
    earlier = ({"role": "assistant", "content": "It may be."}, *asked) if turns == 2 else ()
    messages = (*asked, *earlier)
    return Prompt(prompt_id(messages), "probe", "probe", messages, answer={"role": "assistant", "content": answer})
