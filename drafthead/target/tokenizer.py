"""A target's tokenizer, and which control tokens its chat template can emit.

A special token that the head cannot propose ends every draft that reaches it, at each message and each channel. The
few that matter are read off the template's own text: what it writes stands in it, literally or under the name of a
variable such as `eos_token`. To these come the tokens on which generation stops.
"""

import re
from typing import TYPE_CHECKING

from pydantic import BaseModel

from drafthead.config import Recipe
from drafthead.files import reading_external
from drafthead.target.files import AGAIN, OTHER, TEMPLATES, local_files, pinned_revision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = "generation_config.json"


_TEMPLATE, _LEGACY, _CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"


class _Generation(BaseModel):
    eos_token_id: int | list[int] | None = None


class _Named(BaseModel):
    name: str
    template: str


class _Templated(BaseModel):
    chat_template: str | list[_Named] | None = None


def chat_template(recipe: Recipe) -> str | dict[str, str]:
    """The target's chat template, or its templates by name, from the files where transformers and vLLM look for them.

    Raises:
        FileNotFoundError: the target is not on this machine.
        ForeignFileError: a file is damaged.
        ValueError: there is no template, or several and none is called `default`.
    """
    path, names = recipe.target_path, (_TEMPLATE, _CONFIG, _LEGACY)
    directory = local_files(path, recipe.target.revision, ("config.json",))
    if not any((directory / name).is_file() for name in names):  # of a hub id perhaps only config.json is here
        directory = local_files(path, recipe.target.revision, names, optional=True)
    templates: dict[str, str] = {}
    for file in (directory / _TEMPLATE, *sorted((directory / TEMPLATES).glob("*.jinja"))):
        if file.is_file():
            with reading_external(file, AGAIN):
                templates["default" if file.name == _TEMPLATE else file.stem] = file.read_text(encoding="utf-8")
    for file in (directory / _CONFIG, directory / _LEGACY):
        if not templates and file.is_file():
            with reading_external(file, AGAIN):
                stated = _Templated.model_validate_json(file.read_bytes()).chat_template or []
            several = {one.name: one.template for one in stated} if isinstance(stated, list) else {"default": stated}
            templates = {name: template for name, template in several.items() if template}
    if not templates:
        looked = ", ".join((_TEMPLATE, f"{TEMPLATES}/*.jinja", _CONFIG, _LEGACY))
        raise ValueError(
            f"target {recipe.target.path} has no chat template (looked in {directory} for {looked}); a head must be "
            "trained on templated prompts: use the instruction-tuned checkpoint"
        )
    if "default" not in templates:
        raise ValueError(
            f"target {recipe.target.path} has chat templates called {', '.join(sorted(templates))} in {directory} and "
            f"none called default: write the one that is served into {_TEMPLATE}"
        )
    return templates if len(templates) > 1 else templates["default"]


def load_tokenizer(recipe: Recipe, templated: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of the recipe's target, at the commit that everything else of it has.

    Args:
        recipe: recipe; its target section is read.
        templated: whether a tokenizer without a chat template is refused.

    Raises:
        OSError: it is not on this machine.
        ValueError: it has no chat template, or one that does not read target.chat_template_kwargs, or needs code of the
            repository that target.trust_remote_code forbids.
    """
    from transformers import AutoTokenizer

    target = recipe.target
    revision = pinned_revision(recipe.target_path, target.revision)
    with reading_external(f"the tokenizer of {target.path}", AGAIN, unsupported=OTHER):
        tokenizer = AutoTokenizer.from_pretrained(
            recipe.target_path, revision=revision, trust_remote_code=target.trust_remote_code
        )
    if templated and not tokenizer.chat_template:  # a file that transformers reads for processors only
        tokenizer.chat_template = chat_template(recipe)
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
        with reading_external(path, AGAIN):
            stop_ids = _Generation.model_validate_json(path.read_bytes()).eos_token_id
        stops += stop_ids if isinstance(stop_ids, list) else [stop_ids]
    return {stop for stop in stops if stop is not None}
