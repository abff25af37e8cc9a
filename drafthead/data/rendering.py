"""Chat templates: from messages to token ids, and from generated token ids back to a message.

Text must not turn into control tokens: most chat templates paste messages into one string, and a tokenizer reads
`<|end|>` in it as the end of a message, whoever wrote it. A prompt with such text is left out, with a reason that
callers count. The alternative, encoding the text of each message by itself, would give such a prompt token ids that
the server it is meant for does not produce.

Some templates write today's date into every prompt (`strftime_now`; gpt-oss's does). Here the date is fixed to the day
the prompts were made: otherwise responses, checks and the methods of an evaluation would read other prompts after
midnight.

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

Back: Harmony is read by `openai-harmony`. Its parser knows the ids of one vocabulary, so what another tokenizer
generated is translated first: control tokens by their names, the text between them as text. Everything else is plain
text with an optional thought that ends at `</think>`, which is how Qwen, DeepSeek and GLM write it; a template that
keeps thoughts elsewhere gets them back as part of the message.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from drafthead.artifacts import MANIFEST, read_json
from drafthead.config import Recipe
from drafthead.data.prompts import THOUGHT_KEYS, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL_TOKEN = "text contains a control token of the tokenizer"
BEYOND_VOCABULARY = "token ids lie beyond the target's vocabulary"
TEMPLATE = "the chat template refuses the conversation"
NO_ROOM = "no room for a response in engine.max_model_len"
NO_RESPONSE = "the data has no response to the last message"
IS_CONTEXT = "the data marks its response as not to be learned"
IS_CALL = "the response is a tool call"
BROKEN_OFF = "the data's response has another finish_reason than stop or length"
UNSTABLE = "the chat template gives no stable boundary between prompt and response"
NO_STOP = "the chat template ends the response with no stop token of the target"
ALTERED = "the chat template does not repeat the response as it is"
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")


class UnrenderableError(ValueError):
    """A prompt has no token ids for this target; `reason` is one of this module's constants, or the template's own."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Renderer:
    """Calls of one tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        day: date | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        """
        Args:
            tokenizer: tokenizer of the target, with a chat template.
            day: date given to the template (`template_day`); None: a template that reads the clock gets today's.
            template_kwargs: further arguments of the template, target.chat_template_kwargs.
        """
        self._tokenizer = tokenizer
        self._variables: dict[str, Any] = {} if day is None else {"strftime_now": day.strftime}
        self._variables |= template_kwargs or {}
        control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._control = [json.dumps(token, ensure_ascii=False)[1:-1] for token in control]  # as in the JSON of a text
        self._size = len(tokenizer)

    def __call__(self, prompt: Prompt, effort: str, response: dict[str, Any] | None = None) -> list[int]:
        """Token ids of a prompt, generation prompt included, or with its response, as the template writes a
        conversation that ended; those that a prompt has already are read as they are.

        Raises:
            UnrenderableError: the text holds a control token, the template refuses the conversation, or an
                id lies beyond the vocabulary.
        """
        if prompt.prompt_ids is not None:
            return self.checked_ids(prompt.prompt_ids)
        messages = [*prompt.messages, *([response] if response else [])]
        text = json.dumps([messages, prompt.tools], ensure_ascii=False)
        if control_token := next((token for token in self._control if token in text), None):
            raise UnrenderableError(CONTROL_TOKEN, control_token)
        try:
            encoding: Any = self._tokenizer.apply_chat_template(
                messages,
                tools=list(prompt.tools) if prompt.tools else None,
                add_generation_prompt=response is None,
                reasoning_effort=effort,
                **self._variables,
                return_dict=True,
            )
        except (TemplateError, TypeError, ValueError) as error:  # such as of a tool without the keys that it reads
            raise UnrenderableError(f"{TEMPLATE}: {str(error)[:200]}") from error
        return list(encoding["input_ids"])

    def checked_ids(self, ids: Sequence[int]) -> list[int]:
        """Token ids as they are; raises UnrenderableError where one lies beyond the vocabulary."""
        if max(ids) >= self._size:
            raise UnrenderableError(BEYOND_VOCABULARY, f"{max(ids)}, but there are {self._size} tokens")
        return list(ids)


class KeptResponses:
    """Responses that the data already has, as tokens: where the prompt ends, what the target would have generated."""

    def __init__(self, render: Renderer, tokenizer: "PreTrainedTokenizerBase", stop_ids: set[int]):
        """
        Args:
            render: renderer of prompts with the same tokenizer.
            tokenizer: tokenizer of the target, with a chat template.
            stop_ids: tokens on which the target's generation ends.
        """
        self._render, self._parse, self._stops = render, response_parser(tokenizer), stop_ids

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether a response ends as the target's generation does, on a stop token."""
        return ids[-1] in self._stops

    def __call__(self, prompt: Prompt, prompt_ids: list[int], effort: str) -> list[int]:
        """Token ids of a prompt's response: those of the data, or of its text, as the engine would have generated them,
        stop token included unless its finish_reason is "length".

        Args:
            prompt: prompt whose response the data has.
            prompt_ids: token ids of the prompt without the response.
            effort: reasoning effort that the prompt is rendered with.

        Raises:
            UnrenderableError: there is no response, or it has no tokens with a boundary.
        """
        if prompt.response_ids is not None:
            return self._render.checked_ids(prompt.response_ids)
        response = prompt.response
        if response is None:
            raise UnrenderableError(NO_RESPONSE, prompt.id)
        if response.get("weight") == 0:
            raise UnrenderableError(IS_CONTEXT, prompt.id)
        if response.get("tool_calls"):
            raise UnrenderableError(IS_CALL, prompt.id)
        truncated = response.get("finish_reason") == "length"
        if not truncated and "finish_reason" in response:
            raise UnrenderableError(BROKEN_OFF, prompt.id)
        thought = response.get("thinking")
        message = {"role": "assistant", "content": response["content"]}
        message |= dict.fromkeys(THOUGHT_KEYS, thought) if thought else {}
        whole = self._render(prompt, effort, message)
        if whole[: len(prompt_ids)] != prompt_ids:
            raise UnrenderableError(UNSTABLE, prompt.id)
        rest = whole[len(prompt_ids) :]
        end = next((i for i, token in enumerate(rest) if token in self._stops), None)
        if end is None:
            raise UnrenderableError(NO_STOP, prompt.id)
        parsed = self._parse(rest[: end + 1])
        for original, parsed_text in ((response["content"], parsed.content), (thought, parsed.thinking)):
            if original is not None and original.strip() != parsed_text.strip():
                raise UnrenderableError(ALTERED, prompt.id)
        return rest[: end if truncated else end + 1]


def renderer(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> Renderer:
    """A function (prompt, reasoning effort) -> token ids, generation prompt included."""
    return Renderer(tokenizer, template_day(recipe, tokenizer), recipe.target.chat_template_kwargs)


def template_day(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> date | None:
    """The day given to the chat template: the recipe's, or the one on which its prompts were made (UTC).

    None where the template's text does not depend on the day.

    Raises:
        FileNotFoundError: the recipe names no day and has no prompts yet.
    """
    if "strftime_now" not in str(tokenizer.chat_template):
        return None
    if recipe.prompts.date:
        return recipe.prompts.date
    return date.fromisoformat(read_json(recipe.prompts_dir / MANIFEST)["made_by"]["created"][:10])


# ---- From generated token ids back to the message that a server would hand to its client ----


@dataclass(frozen=True)
class ParsedResponse:
    """A generated response in its parts.

    Attributes:
        content: text addressed to the user; empty when the response ended before.
        thinking: text before the content, such as a chain of thought.
        is_call: a tool is called, so the conversation goes on with its result, not with the user.
    """

    content: str
    thinking: str = ""
    is_call: bool = False


def response_parser(tokenizer: "PreTrainedTokenizerBase") -> Callable[[Sequence[int]], ParsedResponse]:
    """A function from the generated ids of one response, stop token included or not, to its parts."""
    names = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    if set(_HARMONY) <= set(names.values()) and "<|channel|>" in str(tokenizer.chat_template):
        control = {i: name for i, name in names.items() if name in _HARMONY}
        return lambda token_ids: _parse_harmony(tokenizer, control, token_ids)
    return lambda token_ids: _parse_plain(tokenizer, token_ids)


def _parse_plain(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> ParsedResponse:
    text = str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
    thinking, end, content = text.partition("</think>")
    return ParsedResponse(content, thinking.removeprefix("<think>")) if end else ParsedResponse(text)


def _parse_harmony(
    tokenizer: "PreTrainedTokenizerBase", control: dict[int, str], token_ids: Sequence[int]
) -> ParsedResponse:
    from openai_harmony import HarmonyError, Role, StreamableParser

    encoding = _harmony_encoding()
    parser = StreamableParser(encoding, role=Role.ASSISTANT, strict=False)
    try:
        for is_control, run in groupby(token_ids, control.__contains__):
            if is_control:
                translated = encoding.encode("".join(control[i] for i in run), allowed_special="all")
            else:
                text = str(tokenizer.decode(list(run), skip_special_tokens=False))
                translated = encoding.encode(text, disallowed_special=())
            for token in translated:
                parser.process(token)
    except HarmonyError:
        pass  # the target broke the format here; what came before counts
    parts = [(m.channel, m.recipient, "".join(getattr(c, "text", "") for c in m.content)) for m in parser.messages]
    parts.append((parser.current_channel, parser.current_recipient, parser.current_content))
    final, analysis = (
        "".join(text for channel, recipient, text in parts if channel == name and recipient is None)
        for name in ("final", "analysis")
    )
    return ParsedResponse(final, analysis, is_call=any(recipient is not None for _, recipient, _ in parts))


@cache
def _harmony_encoding() -> Any:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
