"""A target's tokenizer, and which control tokens its chat template can emit.

A special token that the head cannot propose ends every draft that reaches it, at each message and each channel. The
few that matter are read off the template's own text: what it writes stands in it, literally or under the name of a
variable such as `eos_token`. To these come the tokens on which generation stops.
"""

import re
from typing import TYPE_CHECKING

from pydantic import BaseModel

from drafthead.config import Recipe
from drafthead.files import foreign
from drafthead.target.files import AGAIN, local_files, pinned_revision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = "generation_config.json"


class _Generation(BaseModel):
    eos_token_id: int | list[int] | None = None


def load_tokenizer(recipe: Recipe, templated: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of the recipe's target, at the commit that everything else of it has.

    Args:
        recipe: its target section is used.
        templated: refuse one without a chat template.

    Raises:
        OSError: it is not on this machine.
        ValueError: it has no chat template, or one that does not read target.chat_template_kwargs, or needs code of the
            repository that target.trust_remote_code forbids.
    """
    from transformers import AutoTokenizer

    target = recipe.target
    revision = pinned_revision(recipe.target_path, target.revision)
    with foreign(f"the tokenizer of {target.path}", AGAIN, unsupported=OTHER):
        tokenizer = AutoTokenizer.from_pretrained(
            recipe.target_path, revision=revision, trust_remote_code=target.trust_remote_code
        )
    if templated and not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {recipe.target.path} has no chat template; a head must be trained on templated prompts, "
            "use the instruction-tuned checkpoint"
        )
    template = str(tokenizer.chat_template)
    if unread := [name for name in target.chat_template_kwargs if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise ValueError(
            f"target.chat_template_kwargs has {unread[0]}, which the chat template of {target.path} does not read; "
            "correct its spelling, or leave it out"
        )
    return tokenizer


def special_tokens(recipe: Recipe) -> tuple[set[int], set[int]]:
    """Ids of all special tokens of a target's tokenizer, and of those that its template or its generation can emit."""
    tokenizer = load_tokenizer(recipe)
    special = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    template = str(tokenizer.chat_template)  # or several by name
    named = {str(getattr(tokenizer, name)) for name in ("bos_token", "eos_token", "pad_token") if name in template}
    emitted = {i for i, content in special.items() if content in template or content in named}
    return set(special), emitted | (stop_tokens(recipe, tokenizer) & set(special))


def stop_tokens(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Ids of the tokens on which a target's generation ends."""
    path = local_files(recipe.target_path, recipe.target.revision, (_GENERATION,), optional=True) / _GENERATION
    stops: list[int | None] = [tokenizer.eos_token_id]
    if path.is_file():  # a target need not have one
        with foreign(path, AGAIN):
            found = _Generation.model_validate_json(path.read_bytes()).eos_token_id
        stops += found if isinstance(found, list) else [found]
    return {stop for stop in stops if stop is not None}
