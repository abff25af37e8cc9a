"""What every section of a recipe is: typed, frozen, and strict about its keys."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# torch and vLLM take no larger one.
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    """A part of the recipe; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True, allow_inf_nan=False)
