"""The recipe's section on prompts: which conversations, how many, and which stay held out."""

import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from drafthead.section import Section, Seed

_Count = Annotated[int, Field(ge=0)]


class PromptSource(Section):
    """One source of a mix. Without `train` and `heldout`, no prompt that overlaps it is trained on."""

    name: str  # of drafthead/generation/sources.py, or any name together with a path
    path: str | None = None  # file or folder, relative to the checkout or absolute; None: the hub's cache
    train: _Count | dict[str, _Count] = 0  # prompts; by category: categories that are not listed are not read
    heldout: _Count = 0  # prompts
    turns: Literal["first", "last", "all"] = "last"  # which user messages of a conversation become prompts
    heldout_share: float | None = Field(default=None, gt=0, le=1)  # of the documents; None: the catalogue's


class PromptsConfig(Section):
    """Which conversations the head learns from and is judged on. Exactly one of path, preset and sources is given."""

    path: str | None = None  # one file of prompts (docs/prompts.md), whose rows may declare their split
    preset: Literal["standard"] | None = None  # ShareGPT, MLPerf gpt-oss and SWE-bench
    sources: tuple[PromptSource, ...] | None = None
    max_train: int | None = Field(default=None, gt=0)  # None: all; otherwise drawn evenly from the categories
    max_heldout: int | None = Field(default=None, gt=0)
    validation: int = Field(default=48, gt=0)  # drawn from the training split; picks the checkpoint
    seed: Seed = 0
    # For chat templates that write the current date, such as gpt-oss's; None: the day the prompts were made.
    date: datetime.date | None = None

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        given = [name for name in ("path", "preset", "sources") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, preset and sources, found {' and '.join(given) or 'none'}")
        names = [source.name for source in self.sources or ()]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"source {min(twice)} is given twice: name each once, with a path of its own if need be")
        return self
