"""What every section of a recipe is: typed, frozen, and strict about its keys."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

# torch and vLLM take no larger one.
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    """A part of the recipe; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), serialize_by_alias=True, allow_inf_nan=False
    )


def holds_secret(url: str) -> bool:
    """Whether a URL carries what may be a key: a user name, a password, a query, or a form that hides one."""
    try:
        parts = urlsplit(url)
    except ValueError:  # half an IPv6 address, or characters that are another's when normalised
        return "@" in url or "?" in url
    return "@" in url or bool(parts.query)
