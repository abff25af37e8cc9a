"""Which control tokens a target's chat template can emit.

A special token that the head cannot propose ends every draft that reaches it, at each message and each channel. The
few that matter are read off the template's own text: what it writes stands in it, literally or under the name of a
variable such as `eos_token`. To these come the tokens on which generation stops.
"""

from typing import Any


def special_tokens(path: str, revision: str | None = None) -> tuple[set[int], set[int]]:
    """Ids of all special tokens of a target's tokenizer, and of those that its template or its generation can emit."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=revision)
    special = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    template = _text(tokenizer.chat_template)
    named = {str(getattr(tokenizer, name)) for name in ("bos_token", "eos_token", "pad_token") if name in template}
    emitted = {i for i, content in special.items() if content in template or content in named}
    return set(special), emitted | (stop_tokens(tokenizer, path, revision) & set(special))


def _text(template: str | dict[str, str] | None) -> str:
    """A tokenizer may have several templates by name."""
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def stop_tokens(tokenizer: Any, path: str, revision: str | None) -> set[int]:
    """Ids of the tokens on which a target's generation ends."""
    from transformers import GenerationConfig

    stops = {tokenizer.eos_token_id}
    try:
        configured = GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except OSError:  # a target need not have one
        configured = None
    stops |= set(configured) if isinstance(configured, list) else {configured}
    return stops - {None}
