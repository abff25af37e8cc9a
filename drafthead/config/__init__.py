"""The recipe: everything about one head, in one typed and strict YAML file.

A recipe has one section per stage. An unknown key, a wrong type or an impossible combination is an
error before any work starts. Values can be overridden on the command line with dotted keys
(`train.learning_rate=1e-3`). What this gives up is free-form configuration: a knob exists only when
it is declared and documented here.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf
from pydantic import BaseModel, ValidationError

from drafthead.config.recipe import DEFAULT_RECIPE, REPO_ROOT, Recipe
from drafthead.drafters.registry import section_of
from drafthead.files import reading_external

logger = logging.getLogger(__name__)


def load_recipe(path: str | os.PathLike[str] = DEFAULT_RECIPE, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply dotted overrides.

    Raises:
        FileNotFoundError: the recipe does not exist.
        ValueError: it is not valid; the message names each key, its value and what is wrong.
    """
    path = Path(path)
    if not path.is_file():
        known = ", ".join(sorted(str(p.relative_to(REPO_ROOT)) for p in DEFAULT_RECIPE.parent.glob("*.yaml")))
        raise FileNotFoundError(f"recipe {path} does not exist; the checkout {REPO_ROOT} has: {known}")
    if malformed := [item for item in overrides if "=" not in item]:
        raise ValueError(f"override {malformed[0]!r} is not of the form section.key=value")
    # `${oc.env:HF_TOKEN}` in a recipe would carry a secret into manifests and the model card.
    if interpolated := [item for item in overrides if "${" in item]:
        raise ValueError(f"override {interpolated[0]!r}: nothing is interpolated in a recipe; write the value")
    with reading_external(f"recipe {path}", "It is not valid YAML in UTF-8: correct that place", ValueError):
        recipe = OmegaConf.load(path)
    for item in overrides:  # a mapping replaces what is there, as a number does: half a distribution is none
        with reading_external(f"override {item!r}", f"It does not fit recipe {path}: correct it", ValueError):
            key = item.partition("=")[0]
            OmegaConf.update(recipe, key, OmegaConf.select(OmegaConf.from_dotlist([item]), key), merge=False)
    values: Any = OmegaConf.to_container(recipe, resolve=False)
    _drop_other_drafters(values, [item.partition("=")[0] for item in overrides])
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError(_readable(path, error)) from error


def _drop_other_drafters(values: Any, override_keys: list[str]) -> None:
    """Leave out what the file, or the command line before its `head.type`, says of another drafter."""
    chosen = "head.type" in override_keys and isinstance(values["head"], dict)
    section = section_of(values["head"].get("type")) if chosen else None
    if section is not None:
        since = override_keys[override_keys.index("head.type") :]
        strange = [key for key in values["head"] if key not in section.model_fields and f"head.{key}" not in since]
        for key in strange:
            del values["head"][key]
        if strange:
            logger.info(f"head.type={values['head']['type']}: the recipe's head.{', head.'.join(strange)} left out")


def _keys(kind: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a section class, those of the sections inside it included."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield prefix + name
            yield from _keys(field.annotation, f"{prefix}{name}.")
    for part in get_args(kind):
        yield from _keys(part, prefix)


def _readable(path: Path, error: ValidationError) -> str:
    lines = [f"recipe {path} is not valid:"]
    for problem in error.errors():
        loc = problem["loc"]
        if loc[:1] == ("head",):  # between section and key stands the type of the head
            loc = (*loc[:1], *loc[2:])
        key = ".".join(map(str, loc))
        shown = "" if isinstance(problem["input"], dict) else f" (given: {problem['input']!r})"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            named = ".".join(part for part in map(str, loc) if not part.isdecimal())  # an entry of a list has no name
            close = get_close_matches(named, set(_keys(Recipe)), 1, cutoff=0.75)
            message = (
                f"unknown key; did you mean {close[0]}?" if close else "unknown key; docs/ describes the known ones"
            )
            shown = ""
        elif problem["type"].startswith("union_tag"):
            tags = problem["ctx"]
            key, shown = "head.type", ""
            message = f"give one of {tags.get('expected_tags', 'eagle3, dflash, ...')}, not {tags.get('tag')!r}"
        lines.append(f"  {key}: {message}{shown}" if key else f"  {message}")
    return "\n".join(lines)
