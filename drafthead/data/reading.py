"""From generated token ids back to the message that a server would hand to its client.

Harmony is read by `openai-harmony`. Its parser knows the ids of one vocabulary, so what another tokenizer generated
is translated first: control tokens by their names, the text between them as text. Everything else is plain text with
an optional thought that ends at `</think>`, which is how Qwen, DeepSeek and GLM write it; a template that keeps
thoughts elsewhere gets them back as part of the message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")


@dataclass(frozen=True)
class ParsedResponse:
    """A generated response in its parts.

    Attributes:
        content: addressed to the user; empty when the response ended before.
        thinking: what came before it.
        is_call: a tool is called, so the conversation goes on with its result, not with the user.
    """

    content: str
    thinking: str = ""
    is_call: bool = False

    def message(self) -> dict[str, Any]:
        """As a client sends it back in the next turn: without the thought."""
        return {"role": "assistant", "content": self.content}


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
        for token in _translate(tokenizer, control, encoding, token_ids):
            parser.process(token)
    except HarmonyError:
        pass  # the target broke the format here; what came before counts
    parts = [(m.channel, m.recipient, "".join(getattr(c, "text", "") for c in m.content)) for m in parser.messages]
    parts.append((parser.current_channel, parser.current_recipient, parser.current_content))
    final, analysis = (
        "".join(text for channel, recipient, text in parts if channel == wanted and recipient is None)
        for wanted in ("final", "analysis")
    )
    return ParsedResponse(final, analysis, is_call=any(recipient is not None for _, recipient, _ in parts))


def _translate(
    tokenizer: "PreTrainedTokenizerBase", control: dict[int, str], encoding: Any, token_ids: Sequence[int]
) -> list[int]:
    """The same text and control tokens in openai-harmony's own vocabulary."""
    translated: list[int] = []
    for is_control, run in groupby(token_ids, control.__contains__):
        if is_control:
            for token in run:
                translated += encoding.encode(control[token], allowed_special="all")
        else:
            text = str(tokenizer.decode(list(run), skip_special_tokens=False))
            translated += encoding.encode(text, disallowed_special=())
    return translated


@cache
def _harmony_encoding() -> Any:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
