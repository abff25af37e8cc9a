"""The recipe's section on responses: how the target generates them, and which are kept.

Distributions are lists of equal or mappings of weighted values; each conversation draws from them by a hash of
`seed` and its prompt's id (drafthead/generation/dialogue.py), so a restart draws the same.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from drafthead.section import Section, Seed

Effort = Literal["low", "medium", "high"]
Weight = Annotated[int, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0)]
Fault = Literal["truncated", "refused", "looping"]  # how they are told: drafthead/generation/dialogue.py

# How refusals begin in the words of public chat models; compared without case, with straight apostrophes.
REFUSALS = (
    "i'm sorry, but i can",  # can't, cannot, can not
    "i'm sorry, i can",
    "sorry, but i can",
    "sorry, i can",
    "i can't help with",
    "i can't assist with",
    "i cannot help with",
    "i cannot assist with",
    "i'm unable to help",
    "i'm unable to assist",
    "i am unable to",
    "i won't help",
)


class ResponsesConfig(Section):
    """How the training prompts get their responses. Those to validation prompts are always generated, greedily."""

    regenerate: bool = True  # False: training keeps the responses that the data has
    # Earlier responses of a chat: the target's own, every turn generated in order, or those of the data.
    history: Literal["regenerated", "given"] = "regenerated"
    # One value, or value -> weight (whole numbers): one is drawn per conversation.
    temperature: Temperature | Annotated[dict[Temperature, Weight], Field(min_length=1)] = 1.0
    reasoning_efforts: tuple[Effort, ...] | dict[Effort, Weight] = Field(default=("medium",), min_length=1)
    max_tokens: int = Field(gt=0)
    prompts_per_part: int = Field(default=1024, gt=0)
    # Which faulty responses are left out. None by default: the target generates such responses in production too.
    drop: tuple[Fault, ...] = ()
    refusal_openings: tuple[str, ...] = REFUSALS
    seed: Seed = 0

    def drops(self, flags: Iterable[str]) -> bool:
        """Whether a response with these flags is left out."""
        return not set(self.drop).isdisjoint(flags)

    def regenerates(self, split: str) -> bool:
        """Whether the target generates a split: validation always, as acceptance is replayed over its own text."""
        return self.regenerate or split == "validation"

    @property
    def temperatures(self) -> dict[float, int]:
        """Temperature -> weight."""
        return self.temperature if isinstance(self.temperature, dict) else {self.temperature: 1}

    @property
    def efforts(self) -> dict[Effort, int]:
        """Reasoning effort -> weight."""
        return Counter(self.reasoning_efforts)

    @property
    def turn_by_turn(self) -> bool:
        """Whether every turn of a chat is generated, on top of the target's own earlier responses."""
        return self.regenerate and self.history == "regenerated"
