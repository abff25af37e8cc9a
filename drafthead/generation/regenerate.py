"""The target generates the responses to the training and validation prompts, so that a head learns the target's text.

Training responses are sampled at a temperature drawn for each conversation, validation responses greedily and some
tokens past the stop, because acceptance is replayed over the target's own T = 0 text. Temperature, effort and seed
follow from prompts.seed and the prompt's id alone. With responses.regenerate false the training split keeps the
responses of the data instead.

A part is the unit of work: a fixed slice of a split's prompts, generated alone and skipped when present. Given up: the
same text on other hardware or with parts of another size; bf16 sums depend on both.

Left out and counted: prompts that leave no room in engine.max_model_len or that cannot be rendered (data.rendering),
and responses that responses.drop names. A chat template that writes the date (gpt-oss) makes prompts of different days
differ; the manifest has the date. Pre-tokenised prompts are read as they are: the reasoning effort noted with them was
drawn but is not in them.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from tqdm import tqdm

from drafthead.artifacts import IDENTITY, ArtifactError, begin, finish, read_json, reference, require
from drafthead.config import Recipe
from drafthead.data.prompts import KIND as PROMPTS
from drafthead.data.prompts import Prompt, read_prompts
from drafthead.data.rendering import template_day
from drafthead.data.responses import KIND, SPLITS, part_path, read_left_out, read_part, read_parts, write_part
from drafthead.engine.generate import Engine
from drafthead.engine.offline import offline_engine
from drafthead.engine.running import Runner, Task, run_here
from drafthead.generation.dialogue import DROPPED, FLAGS, REFUSALS, SplitRules, continuation, make_responses, turns_of
from drafthead.generation.shards import log_rate
from drafthead.target.spec import TargetSpec, recipe_spec, target_identity
from drafthead.target.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def regenerate(recipe: Recipe, run: Runner = run_here) -> None:
    """Make the responses artifacts of both splits; finished parts are kept, and no engine starts when all are.

    Args:
        recipe: recipe; its target, engine, prompts and responses sections are read.
        run: runs the jobs that make the parts.

    Raises:
        ArtifactError: there are no prompts, or a directory holds responses made from something else.
        FileNotFoundError: the target is missing.
        ValueError: the target does not fit the recipe, or a split gets no response.
    """
    settings, spec = recipe.responses, recipe_spec(recipe)
    prompts = require(recipe.prompts_dir, PROMPTS, "python data_gen/prompts.py RECIPE", every_byte=True)
    if not settings.regenerate and prompts["identity"].get("answers") != "kept":
        raise ArtifactError(
            f"responses.regenerate is false, but {recipe.prompts_dir} was written without the responses of its data; "
            "delete it and run: python data_gen/prompts.py RECIPE"
        )
    tokenizer = load_tokenizer(recipe, templated=True)
    day = template_day(recipe, tokenizer)
    dated = {"template_day": str(day)} if day else {}
    for directory in map(recipe.responses_dir, SPLITS):
        before = read_json(path).get("template_day") if (path := directory / IDENTITY).exists() else None
        if day and before and before != str(day):
            raise ArtifactError(
                f"{directory} has responses to prompts that the chat template dates {before}, and those made anew are "
                f"of {day}: give prompts.date={before} here and in every later command"
            )
    unfinished = [
        split
        for split in SPLITS
        if not begin(recipe.responses_dir(split), KIND, _identity(recipe, spec, prompts, split) | dated)
    ]
    for generated in (False, True):  # data without a response to learn from is refused before an engine starts
        splits = [split for split in unfinished if settings.regenerates(split) == generated]
        missing = [part for split in splits for part in list_parts(recipe, split) if not part.path.exists()]
        if missing:
            started, doing = time.monotonic(), "regenerating" if generated else "keeping responses"
            start = partial(part_worker, recipe, generated)
            run(Task(start, recipe.engine.tensor_parallel_size, doing, "response"), missing)
            tokens = sum(len(response.response_ids) for part in missing for response in read_part(part.path))
            log_rate("generated" if generated else "kept", tokens, started)
        for split in splits:
            finish_split(recipe.responses_dir(split))


def _identity(recipe: Recipe, spec: TargetSpec, prompts: dict[str, Any], split: str) -> dict[str, Any]:
    settings = recipe.responses.model_dump() | {"seed": recipe.prompts.seed, "refusal_openings": REFUSALS}
    greedy = {"temperature": 0.0} if split == "validation" else {}
    return {
        "split": split,
        "prompts": reference(prompts),
        "target": target_identity(recipe, spec),
        "dtype": recipe.target.dtype,
        "settings": settings | greedy,
        "continuation_tokens": continuation(recipe.head, split),
        "max_model_len": recipe.engine.max_model_len,
    }


@dataclass(frozen=True)
class Part:
    """A unit of work.

    Attributes:
        split: "train" or "validation".
        path: path of the part.
        prompts: prompts of the part, a slice of the split.
        size: responses to be generated: one per prompt, or one per turn.
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
        Part(split, part_path(directory, i), part, sum(len(turns_of(prompt, turn_by_turn)) for prompt in part))
        for i, part in enumerate(slices)
    ]


@contextmanager
def part_worker(recipe: Recipe, generates: bool = True) -> Iterator["PartWorker"]:
    """What makes parts: a running engine, or none where nothing is generated."""
    tokenizer = load_tokenizer(recipe, templated=True)
    if not generates:
        yield PartWorker(recipe, tokenizer)
    else:
        with offline_engine(recipe, seeded=True, disable_log_stats=True) as llm:
            yield PartWorker(recipe, tokenizer, Engine(llm))


class PartWorker:
    """Makes parts with one running engine; without one, from the responses that the data has."""

    def __init__(self, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", engine: Engine | None = None):
        self._rules = {split: SplitRules(recipe, split, tokenizer) for split in SPLITS}
        self._engine = engine

    def make(self, part: Part, bar: tqdm) -> None:
        """Generate a part and write it."""
        if self._engine is not None:
            self._engine.reset_cache()
        responses, left_out = make_responses(self._rules[part.split], self._engine, part.prompts, bar)
        write_part(part.path, responses, left_out)

    def finish(self) -> None:
        """Nothing is written in the background."""


def finish_split(directory: Path) -> None:
    """Write the manifest over a split's parts.

    Raises:
        ValueError: they hold no response.
    """
    rows, skipped = _response_rows(directory), Counter[str]()
    for entry in read_left_out(directory):
        if not entry.flags:
            skipped[entry.reason] += entry.turns
    responses, drops = rows[~rows.dropped], rows[rows.dropped]
    if responses.empty:
        reasons = dict(skipped) | ({DROPPED: len(drops)} if len(drops) else {})
        raise ValueError(f"no {directory.name} prompt has a response: {reasons}; correct it and delete {directory}")
    # A response may have several flags, and one that responses.drop names is enough to drop it.
    flagged = {flag: {"kept": int(responses[flag].sum()), "dropped": int(drops[flag].sum())} for flag in FLAGS}
    tokens = {name: int(responses[name].sum()) for name in ("prompt_tokens", "response_tokens")}
    finish(
        directory, {"responses": len(responses), "skipped": skipped, "flagged": flagged, "dropped": len(drops)} | tokens
    )


def _response_rows(directory: Path) -> pd.DataFrame:
    """A row for every response, dropped ones included: category, tokens, whether it was dropped, a column per flag."""
    records: list[tuple] = [
        (r.category, len(r.prompt_ids), len(r.response_ids), False, r.flags)
        for part in read_parts(directory).values()
        for r in part
    ]
    records += [(e.category, None, None, True, e.flags) for e in read_left_out(directory) if e.flags]
    rows = pd.DataFrame(records, columns=["category", "prompt_tokens", "response_tokens", "dropped", "flags"])
    return rows.assign(**{flag: [flag in flags for flags in rows["flags"]] for flag in FLAGS})


def print_responses(recipe: Recipe) -> None:
    """A table per split: responses by category, their mean tokens, and shares of what is wrong, dropped ones included.

    A line per reason why some are missing follows.
    """
    for split in SPLITS:
        directory = recipe.responses_dir(split)
        counts = require(directory, KIND, "python data_gen/regenerate.py RECIPE")["counts"]
        rows = _response_rows(directory)
        groups = pd.concat([rows, rows.assign(category="total")]).groupby("category", sort=False)
        sums = {"kept": groups.size() - groups.dropped.sum(), "dropped": groups.dropped.sum()}
        table = pd.DataFrame(sums | {"mean tokens": groups.response_tokens.mean().round()})
        print(f"{split} responses", table.join(groups[list(FLAGS)].mean().round(2)).to_string(), sep="\n")
        for why, n in counts["skipped"].items():
            print(f"- without a response: {n}, {why}")
        for flag, n in counts["flagged"].items():
            if n["dropped"]:
                print(f"- dropped as {flag}: {n['dropped']}")
