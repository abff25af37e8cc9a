"""What acceptance is measured over: every method at every K, temperature and reasoning effort that the recipe lists."""

from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

from drafthead.config import Recipe
from drafthead.config.evaluation import Effort
from drafthead.evaluation.workload import BASELINE, method_of


@dataclass(frozen=True)
class Condition:
    """One measurement over all prompts.

    Attributes:
        method: by name.
        k: draft tokens; 0 for the baseline.
        temperature, effort: of the responses.
        main: the first of every list of the recipe, which the report shows.
    """

    method: str
    k: int
    temperature: float
    effort: Effort
    main: bool

    @property
    def passes(self) -> int:
        """How often the prompts are answered: the greedy baseline does it twice."""
        return 1 + (self.method == BASELINE and self.temperature == 0)

    def path(self, directory: Path) -> Path:
        """The file of its rows."""
        if self.main:
            return directory / f"arm-{self.method}.parquet"
        return directory / f"also-{self.method}-k{self.k}-t{self.temperature:g}-{self.effort}.parquet"


def conditions(recipe: Recipe) -> list[Condition]:
    """All of them, those that share an engine together, the baseline first."""
    found = []
    for method in (BASELINE, *(method.name for method in recipe.eval.methods)):
        ks = (0,) if method == BASELINE else recipe.eval.draft_tokens_of(method_of(recipe, method))
        grid = product(ks, recipe.eval.temperatures, recipe.eval.reasoning_efforts)
        found += [Condition(method, *values, main=not index) for index, values in enumerate(grid)]
    return found


def by_engine(found: list[Condition]) -> list[list[Condition]]:
    """Groups that one engine can answer: the same method at the same K."""
    return [list(group) for _, group in groupby(found, key=lambda c: (c.method, c.k))]
