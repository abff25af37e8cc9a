"""The unit of work of regeneration: a part, which is a fixed slice of a split's prompts.

A part is answered alone: which prompts share a batch follows from the part, not from what ran before it or on who ran
it. Resuming, retrying and spreading over processes and nodes are therefore the same thing: make the parts that are not
there.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.data.prompts import Prompt, read_prompts
from drafthead.data.responses import part_path, write_part
from drafthead.engine.answering import Answerer, engine_answerer
from drafthead.engine.capture.capturing import CapturingEngine, capturing_engine
from drafthead.generation.responses.dialogue import open_dialogue
from drafthead.generation.responses.turns import Interviewer
from drafthead.generation.running import Task
from drafthead.generation.states.one_pass import forget_part, shards_of_part
from drafthead.target.pieces import TargetSpec
from drafthead.target.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Part:
    """A unit of work.

    Attributes:
        split: "train" or "validation".
        path: where the part is written.
        prompts: the slice of the split that it answers.
        size: answers to be given: one per prompt, or one per turn.
    """

    split: str
    path: Path
    prompts: Sequence[Prompt]
    size: int


def list_parts(recipe: Recipe, split: str) -> list[Part]:
    """The parts of a split, in order."""
    prompts, size = read_prompts(recipe.prompts_dir, split), recipe.responses.prompts_per_part
    directory, turn_by_turn = recipe.responses_dir(split), recipe.responses.turn_by_turn
    slices = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [
        Part(split, part_path(directory, i), part, sum(open_dialogue(p, turn_by_turn).turns_left for p in part))
        for i, part in enumerate(slices)
    ]


class PartAnswerer:
    """Makes parts with one running engine or server."""

    def __init__(self, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", answerer: Answerer):
        self._recipe, self._answerer = recipe, answerer
        self._interviewer = Interviewer(recipe, tokenizer, answerer)

    def make(self, part: Part, bar: tqdm) -> None:
        """Answer the prompts of a part and write it; states that were captured with it follow in the background."""
        self._answerer.forget()
        responses, left_out = self._interviewer.interview(part.split, part.prompts, bar)
        if isinstance(self._answerer, CapturingEngine):
            forget_part(self._recipe, part.split, part.path.stem)
        write_part(part.path, responses, left_out, self._answerer.made_by)
        if isinstance(self._answerer, CapturingEngine):
            jobs = shards_of_part(self._recipe, part.split, part.path.stem, responses)
            slots = [slot for job in jobs for slot in job.slots()]
            self._answerer.store(slots, [text for job in jobs for text in job.texts()])

    def finish(self) -> None:
        """Wait until everything is on disk."""
        if isinstance(self._answerer, CapturingEngine):
            self._answerer.finish()


def answering_parts(recipe: Recipe, spec: TargetSpec) -> Task:
    """The task of making parts."""
    return Task(partial(part_answerer, recipe, spec), "regenerating", "answer", "part")


@contextmanager
def part_answerer(recipe: Recipe, spec: TargetSpec) -> Iterator[PartAnswerer]:
    """A running engine, or the recipe's server, that makes parts."""
    tokenizer = load_tokenizer(recipe, templated=True)
    with answering(recipe, spec, tokenizer) as answerer:
        yield PartAnswerer(recipe, tokenizer, answerer)


def answering(
    recipe: Recipe, spec: TargetSpec, tokenizer: "PreTrainedTokenizerBase"
) -> AbstractContextManager[Answerer]:
    """Who runs the target: the recipe's server, or an engine of our own, which may keep states."""
    if recipe.states.one_pass:
        return capturing_engine(recipe, spec)
    if recipe.responses.server_url is None:
        return engine_answerer(recipe)
    from drafthead.engine.remote import server_answerer

    return server_answerer(recipe, tokenizer)
