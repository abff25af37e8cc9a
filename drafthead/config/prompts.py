"""The recipe's section on prompts: which conversations, how many, and which stay held out."""

import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from drafthead.section import Section


class PromptSource(Section):
    """One source of a mix. Exactly one of `train`, `weight` and `categories` sets how much of it is trained on."""

    name: str  # of drafthead/generation/sources.py, or any name together with a path
    path: str | None = None  # file or folder, relative to the checkout or absolute; None: the hub's cache
    train: int | None = Field(default=None, ge=0)  # training prompts
    weight: float | None = Field(default=None, gt=0)  # share of all training prompts, relative to the other weights
    heldout: int = Field(default=0, ge=0)  # held-out prompts
    # Category -> weight within the source; without `train` and `weight`, category -> number of training prompts.
    categories: dict[str, Annotated[float, Field(ge=0)]] | None = None
    turns: Literal["first", "last", "all"] = "last"  # which user messages of a conversation become prompts
    heldout_share: float | None = Field(default=None, gt=0, le=1)  # of the documents; None: the catalogue's

    @model_validator(mode="after")
    def _check_amount(self) -> Self:
        if self.train is not None and self.weight is not None:
            raise ValueError(f"source {self.name} has both train {self.train} and weight {self.weight}: keep one")
        counts = self.categories if self.train is None and self.weight is None else None
        for category, count in (counts or {}).items():
            if count != int(count):
                raise ValueError(
                    f"source {self.name}: category {category} has {count} where a number of prompts is wanted; "
                    "with `train` or `weight` on the source, categories are weights"
                )
        return self


class PromptsConfig(Section):
    """Which conversations the head learns from and is judged on. Exactly one of path, preset and sources is given."""

    path: str | None = None  # one file of prompts (docs/prompts.md), whose rows may declare their split
    preset: Literal["standard"] | None = None  # ShareGPT, MLPerf gpt-oss and SWE-bench
    sources: tuple[PromptSource, ...] | None = None
    # None: all; otherwise an even draw per category, or what the weights of a mix share.
    max_train: int | None = Field(default=None, gt=0)
    max_heldout: int | None = Field(default=None, gt=0)
    validation: int = Field(default=48, gt=0)  # drawn from the training split; picks the checkpoint
    seed: int = Field(default=0, ge=0)
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

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        weighted = [s.name for s in self.sources or () if s.weight is not None]
        counted = [s.name for s in self.sources or () if s.train or (s.categories and s.weight is None)]
        if weighted and counted:
            raise ValueError(f"{weighted[0]} has a weight and {counted[0]} a number of prompts: use one kind for all")
        return self
