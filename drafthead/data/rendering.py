"""From a prompt to the token ids that the target reads: the one place where a chat template is applied.

Text must not turn into control tokens: most chat templates paste messages into one string, and a tokenizer reads
`<|end|>` in it as the end of a message, whoever wrote it. A prompt with such text is left out, with a reason that
callers count. The alternative, encoding the text of each message by itself, would give such a prompt token ids that
the server it is meant for does not produce.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from drafthead.data.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL_TOKEN = "text contains a control token of the tokenizer"
BEYOND_VOCABULARY = "prompt_ids lie beyond the target's vocabulary"
TEMPLATE = "the chat template refuses the conversation"


class UnrenderableError(ValueError):
    """A prompt has no token ids for this target; `reason` is one of this module's constants."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def renderer(tokenizer: "PreTrainedTokenizerBase") -> Callable[[Prompt, str], list[int]]:
    """A function (prompt, reasoning effort) -> token ids, generation prompt included.

    The effort goes to the chat template; prompts that are token ids already are read as they are. The function raises
    UnrenderableError when the text holds a control token, the template refuses the conversation, or an id lies
    beyond the vocabulary.
    """
    control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    size = len(tokenizer)

    def render(prompt: Prompt, effort: str) -> list[int]:
        if prompt.prompt_ids is not None:
            if max(prompt.prompt_ids) >= size:
                raise UnrenderableError(BEYOND_VOCABULARY, f"{max(prompt.prompt_ids)}, but there are {size} tokens")
            return list(prompt.prompt_ids)
        for text in _texts([*prompt.messages, *(prompt.tools or ())]):
            if found := next((token for token in control if token in text), None):
                raise UnrenderableError(CONTROL_TOKEN, found)
        try:
            encoding: Any = tokenizer.apply_chat_template(
                list(prompt.messages),
                tools=list(prompt.tools) if prompt.tools else None,
                add_generation_prompt=True,
                reasoning_effort=effort,
                return_dict=True,
            )
        except TemplateError as error:
            raise UnrenderableError(TEMPLATE, str(error)) from error
        return list(encoding["input_ids"])

    return render


def _texts(value: Any) -> list[str]:
    """Every string anywhere in a message or a tool, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.items() for text in _texts(list(item))]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return []
