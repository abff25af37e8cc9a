"""Every draft model that can be trained, by its `head.type`: a new one is a folder, and a line in each statement."""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Field, TypeAdapter

from drafthead.drafters.config import HeadConfig
from drafthead.drafters.dflash.config import DFlashHead
from drafthead.drafters.dspark.config import DSparkHead
from drafthead.drafters.eagle3.config import Eagle3Head
from drafthead.drafters.peagle.config import PEagleHead

if TYPE_CHECKING:  # a recipe is read without torch
    from drafthead.drafters.base import Drafter

Head = Annotated[Eagle3Head | PEagleHead | DFlashHead | DSparkHead, Field(discriminator="type")]
# Class in drafter.py of that folder.
_DRAFTERS = {"eagle3": "Eagle3", "peagle": "PEagle", "dflash": "DFlash", "dspark": "DSpark"}


def section_of(kind: str) -> type[HeadConfig] | None:
    """The section class of a `head.type`."""
    sections: tuple[type[HeadConfig], ...] = get_args(get_args(Head)[0])
    return next((section for section in sections if kind in get_args(section.model_fields["type"].annotation)), None)


def parse_head(values: Any) -> HeadConfig:
    """A head section from plain values, such as those of a run's record."""
    return TypeAdapter(Head).validate_python(values)


def _drafter(kind: str) -> "type[Drafter]":
    return getattr(import_module(f"drafthead.drafters.{kind}.drafter"), _DRAFTERS[kind])


def drafters() -> dict[str, "type[Drafter]"]:
    """Every drafter by its `head.type`."""
    return {kind: _drafter(kind) for kind in _DRAFTERS}


def drafter_of(head: HeadConfig) -> "Drafter":
    """The drafter that a head section describes; its module is imported only now."""
    return _drafter(head.type)(head)
