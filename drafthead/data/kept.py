"""Responses that the data already has, as tokens: where the prompt ends and what the target would have generated.

Nothing here knows a template's markup. A conversation is rendered twice, up to the generation prompt and with the
response, and the boundary is where the first one ends. That holds only if the first is a beginning of the second,
token by token, which is checked each time:

    up to the question  <|start|>user<|message|>Hi<|end|><|start|>assistant
    with the response   <|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>
    response                                                             ^------------------------------------------^

The response ends with the first stop token; what a template writes after it, no engine would generate. Then the
response is parsed back: a template that trims, rewrites or drops it is found there. A tokenizer that merges the last
character before the boundary with the first after it fails the first check; so do templates whose earlier part depends
on what follows. Responses that fail are left out with a reason that callers count.
"""

from typing import TYPE_CHECKING

from drafthead.data.prompts import Prompt
from drafthead.data.reading import response_parser
from drafthead.data.rendering import Renderer, UnrenderableError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_RESPONSE = "the data has no response to the last message"
IS_CALL = "the response is a tool call"
UNSTABLE = "the chat template gives no stable boundary between prompt and response"
NO_STOP = "the chat template ends the response with no stop token of the target"
ALTERED = "the chat template does not repeat the response as it is"
_THOUGHT_KEYS = ("thinking", "reasoning_content", "reasoning")  # as gpt-oss, Qwen and others name it


class KeptResponses:
    """Splits rendered conversations into prompt and response."""

    def __init__(self, render: Renderer, tokenizer: "PreTrainedTokenizerBase", stop_ids: set[int]):
        """
        Args:
            render: of that tokenizer.
            tokenizer: with a chat template.
            stop_ids: tokens on which the target's generation ends.
        """
        self._render, self._parse, self._stops = render, response_parser(tokenizer), stop_ids

    def __call__(self, prompt: Prompt, prompt_ids: list[int], effort: str) -> list[int]:
        """Token ids of a prompt's response as the engine would have generated them, stop token included.

        Args:
            prompt: with its response.
            prompt_ids: as it is rendered without the response.
            effort: with which it is.

        Raises:
            UnrenderableError: there is no response, or it has no tokens with a boundary.
        """
        response = prompt.response
        if response is None or prompt.prompt_ids is not None:
            raise UnrenderableError(NO_RESPONSE, prompt.id)
        if response.get("tool_calls"):
            raise UnrenderableError(IS_CALL, prompt.id)
        thought = response.get("thinking")
        message = {"role": "assistant", "content": response["content"]}
        message |= dict.fromkeys(_THOUGHT_KEYS, thought) if thought else {}
        whole = self._render.with_response(prompt, message, effort)
        if whole[: len(prompt_ids)] != prompt_ids:
            raise UnrenderableError(UNSTABLE, prompt.id)
        rest = whole[len(prompt_ids) :]
        end = next((i for i, token in enumerate(rest) if token in self._stops), None)
        if end is None:
            raise UnrenderableError(NO_STOP, prompt.id)
        parsed = self._parse(rest[: end + 1])
        for wanted, found in ((response["content"], parsed.content), (thought, parsed.thinking)):
            if wanted is not None and wanted.strip() != found.strip():
                raise UnrenderableError(ALTERED, prompt.id)
        return rest[: end + 1]
