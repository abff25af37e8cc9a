"""What every section of a recipe is: typed, frozen, and strict about its keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the recipe; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), serialize_by_alias=True)
