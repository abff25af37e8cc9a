"""The target generates the responses to the training and validation prompts, so that a head learns the target's text.

Training responses are sampled at a temperature drawn for each conversation, validation responses greedily and K tokens
past the stop, because acceptance is replayed over the target's own T = 0 text (K draft positions). Temperature,
effort and seed follow from responses.seed and the prompt's id alone. With responses.regenerate false the training split
keeps the responses of the data instead.

A part is the unit of work: a fixed slice of a split's prompts, generated alone and skipped when present. Given up: the
same text on other hardware or with parts of another size; bf16 sums depend on both.

Left out and counted: prompts that leave no room in engine.max_model_len or that cannot be rendered (data.rendering),
and responses that responses.drop names. A chat template that writes the date (gpt-oss) makes prompts of different days
differ; the manifest has the date. Pre-tokenised prompts are read as they are: the reasoning effort noted with them was
drawn but is not in them.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from drafthead.artifacts import ArtifactError, begin, finish, reference, require
from drafthead.config import Recipe
from drafthead.data.kept import KeptResponses
from drafthead.data.prompts import KIND as PROMPTS
from drafthead.data.prompts import Prompt, read_prompts
from drafthead.data.rendering import UnrenderableError, reads_clock, renderer, template_day
from drafthead.data.responses import (
    KIND,
    LeftOut,
    Response,
    iter_responses,
    part_path,
    read_left_out,
    read_makers,
    read_part,
    read_parts,
    write_part,
)
from drafthead.engine.capture.capturing import CapturingEngine, capturing_engine
from drafthead.engine.generate import Generator, ServerGenerator, engine_generator
from drafthead.generation.dialogue import (
    DROPPED,
    FLAGS,
    NO_ROOM,
    continuation,
    flags_of,
    generate_responses,
    open_dialogue,
    room_after,
)
from drafthead.generation.draw import draw_sampling
from drafthead.generation.running import Runner, Task, run_here
from drafthead.generation.shards import claim_captured, forget_captured, shards_of_part
from drafthead.progress import progress_bar
from drafthead.target.pieces import TargetSpec, check_aux_layer_ids, load_target_spec, target_identity
from drafthead.target.tokenizer import load_tokenizer, stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
GIVEN = "given"  # finish_reason of a response that the data had


def regenerate(recipe: Recipe, run: Runner = run_here) -> None:
    """Make the responses artifacts of both splits; finished parts are kept, and no engine starts when all are.

    Args:
        recipe: target, engine, responses and states sections are used.
        run: makes the parts.

    Raises:
        ArtifactError: there are no prompts, or a directory holds responses made from something else.
        FileNotFoundError: the target is missing.
        ValueError: the target does not fit the recipe, a split gets no response, the server cannot be used, or
            responses of the data are to be kept and the chat template gives no stable boundaries.
    """
    if recipe.responses.server_url and run is not run_here:
        raise ValueError(
            f"responses.server_url {recipe.responses.server_url} spreads its work itself, at engine.max_num_seqs "
            f"{recipe.engine.max_num_seqs} requests at a time: leave out --cluster, or the URL for engines of our own"
        )
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    prompts = require(recipe.prompts_dir, PROMPTS, "python data_gen/prompts.py RECIPE", every_byte=True)
    if not recipe.responses.regenerate and prompts["identity"].get("answers") != "kept":
        raise ArtifactError(
            f"responses.regenerate is false, but {recipe.prompts_dir} was written without the responses of its data; "
            "delete it and run: python data_gen/prompts.py RECIPE"
        )
    tokenizer = load_tokenizer(recipe, templated=True)
    day = {"template_day": str(template_day(recipe))} if reads_clock(tokenizer) else {}
    unfinished = [
        split
        for split in SPLITS
        if not begin(recipe.responses_dir(split), KIND, _identity(recipe, spec, prompts, split) | day)
    ]
    missing = [part for split in unfinished for part in list_parts(recipe, split) if not part.path.exists()]
    keep_parts(recipe, tokenizer, [part for part in missing if not is_regenerated(recipe, part.split)])
    if to_generate := [part for part in missing if is_regenerated(recipe, part.split)]:
        if recipe.states.one_pass:
            for split in {part.split for part in to_generate}:
                claim_captured(recipe, spec, split)
        started = time.monotonic()
        run(regeneration(recipe, spec), to_generate)
        tokens = sum(len(response.response_ids) for part in to_generate for response in read_part(part.path))
        rate = tokens / (time.monotonic() - started)
        logger.info("generated %s tokens at %s tokens/s, start included", f"{tokens:,}", f"{rate:,.0f}")
    for split in unfinished:
        finish_split(recipe, split)


def is_regenerated(recipe: Recipe, split: str) -> bool:
    """Whether the target generates a split: validation always, as acceptance is replayed over the target's own text."""
    return recipe.responses.regenerate or split == "validation"


def _identity(recipe: Recipe, spec: TargetSpec, prompts: dict[str, Any], split: str) -> dict[str, Any]:
    # A server may move to another address while parts are missing; each part names the one that made it.
    settings = recipe.responses.model_dump(exclude={"server_url"})
    if split == "validation":
        settings["temperature"] = 0.0
    return {
        "split": split,
        "prompts": reference(prompts),
        "target": target_identity(recipe, spec),
        "dtype": recipe.target.dtype,
        "settings": settings,
        "continuation_tokens": continuation(recipe, split),
        "max_model_len": recipe.engine.max_model_len,
    }


@dataclass(frozen=True)
class Part:
    """A unit of work.

    Attributes:
        split: "train" or "validation".
        path: where the part is written.
        prompts: the slice of the split.
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
        Part(split, part_path(directory, i), part, sum(open_dialogue(p, turn_by_turn).turns_left for p in part))
        for i, part in enumerate(slices)
    ]


def regeneration(recipe: Recipe, spec: TargetSpec) -> Task:
    """The task of making parts."""
    gpus = recipe.engine.tensor_parallel_size
    return Task(partial(part_worker, recipe, spec), gpus, "regenerating", "response", "part")


@contextmanager
def part_worker(recipe: Recipe, spec: TargetSpec) -> Iterator["PartWorker"]:
    """A running engine, or the recipe's server, that makes parts."""
    tokenizer = load_tokenizer(recipe, templated=True)
    with running_generator(recipe, spec, tokenizer) as generator:
        yield PartWorker(recipe, tokenizer, generator)


def running_generator(
    recipe: Recipe, spec: TargetSpec, tokenizer: "PreTrainedTokenizerBase"
) -> AbstractContextManager[Generator]:
    """What runs the target: the recipe's server, or an engine of our own, which may keep states."""
    if recipe.states.one_pass:
        return capturing_engine(recipe, spec)
    if recipe.responses.server_url is None:
        return engine_generator(recipe)
    return nullcontext(ServerGenerator(recipe, tokenizer))


class PartWorker:
    """Makes parts with one running engine or server."""

    def __init__(self, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", generator: Generator):
        self._recipe, self._tokenizer, self._generator = recipe, tokenizer, generator

    def make(self, part: Part, bar: tqdm) -> None:
        """Generate a part and write it; states that were captured with it follow in the background."""
        recipe, generator = self._recipe, self._generator
        generator.reset_cache()
        responses, left_out = generate_responses(recipe, self._tokenizer, generator, part.split, part.prompts, bar)
        if not isinstance(generator, CapturingEngine):
            write_part(part.path, responses, left_out, generator.made_by)
            return
        forget_captured(recipe, part.split, part.path.stem)
        write_part(part.path, responses, left_out, generator.made_by)
        jobs = shards_of_part(recipe, part.split, part.path.stem, responses)
        slots = [slot for job in jobs for slot in job.slots()]
        generator.store(slots, [ids for job in jobs for ids in job.sequences()])

    def finish(self) -> None:
        """Wait until everything is on disk."""
        if isinstance(self._generator, CapturingEngine):
            self._generator.finish()


def keep_parts(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", parts: Sequence[Part]) -> None:
    """Write parts from the responses that the data has."""
    if parts:
        with progress_bar(sum(len(part.prompts) for part in parts), "keeping responses", "prompt") as bar:
            for part in parts:
                responses = kept_responses(recipe, tokenizer, part.prompts, bar)
                write_part(part.path, *responses, made_by={"data": "answers kept"})


def kept_responses(
    recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt], bar: tqdm
) -> tuple[list[Response], list[LeftOut]]:
    """`responses.regenerate: false`: the data's responses as the target would have generated them; no engine runs.

    The reasoning effort is drawn as for a generated response, because the template writes it into the prompt;
    temperature and seed are empty. Given up: the text is not the target's own, so the head learns to follow the target
    along paths that the target would not take.

    Returns:
        The responses to training prompts, and what is missing among them.

    Raises:
        ValueError: the chat template gives no stable boundaries.
    """
    settings = recipe.responses
    split_tokens = KeptResponses(renderer(recipe, tokenizer), tokenizer, stop_tokens(recipe, tokenizer))
    responses: list[Response] = []
    left_out: list[LeftOut] = []
    for prompt in prompts:
        bar.update(1)
        effort = draw_sampling(settings, prompt.id, turn=0, greedy=False).effort
        try:
            kept = split_tokens(prompt, effort)
        except UnrenderableError as error:
            left_out.append(LeftOut(prompt.id, prompt.category, error.reason))
            continue
        flags = flags_of(settings, kept.parsed, kept.response_ids, GIVEN)
        if len(kept.response_ids) > room_after(recipe, "train", len(kept.prompt_ids)):
            left_out.append(LeftOut(prompt.id, prompt.category, NO_ROOM))
        elif settings.drops(flags):
            left_out.append(LeftOut(prompt.id, prompt.category, DROPPED, flags))
        else:
            response = Response(
                id=prompt.id,
                category=prompt.category,
                prompt_ids=kept.prompt_ids,
                response_ids=kept.response_ids,
                continuation_ids=[],
                text=str(tokenizer.decode(kept.response_ids, skip_special_tokens=False)),
                finish_reason=GIVEN,
                temperature=None,
                reasoning_effort=effort,
                seed=None,
                flags=flags,
            )
            responses.append(response)
    return responses, left_out


def finish_split(recipe: Recipe, split: str) -> None:
    """Write the manifest over a split's parts.

    Raises:
        ValueError: they hold no response.
    """
    directory = recipe.responses_dir(split)
    left_out = read_left_out(directory)
    skipped: Counter[str] = Counter()
    for entry in left_out:
        skipped[entry.reason] += entry.turns
    kept: Counter[str] = Counter(responses=0, prompt_tokens=0, response_tokens=0)
    flags: Counter[str] = Counter()
    for response in iter_responses(directory):
        sizes = {"prompt_tokens": len(response.prompt_ids), "response_tokens": len(response.response_ids)}
        kept.update(responses=1, **sizes)
        flags.update(set(response.flags))
    if not kept["responses"]:
        raise ValueError(f"no {split} prompt has a response: {dict(skipped)}; correct it and delete {directory}")
    drops = [entry for entry in left_out if entry.flags]
    skipped.pop(DROPPED, None)
    # Of all responses; one may have several flags, and one that responses.drop names is enough.
    flagged = {flag: {"kept": flags[flag], "dropped": sum(flag in entry.flags for entry in drops)} for flag in FLAGS}
    counts = {"responses": kept["responses"], "skipped": dict(skipped), "flagged": flagged, "dropped": len(drops)}
    finish(directory, counts | dict(kept) | {"answered_by": read_makers(directory)})


def print_responses(recipe: Recipe) -> None:
    """A table per split and category: lengths, and shares of what is wrong; a line per reason why some are missing.

    Shares are of all responses, those that were dropped included.
    """
    columns = ("split", "category", "kept", "dropped", "mean tokens", *FLAGS)
    table, notes = Table(*columns, title="Responses", title_justify="left"), []
    for split in SPLITS:
        directory = recipe.responses_dir(split)
        counts = require(directory, KIND, "python data_gen/regenerate.py RECIPE")["counts"]
        kept = list(chain.from_iterable(read_parts(directory).values()))
        drops = [entry for entry in read_left_out(directory) if entry.flags]
        for category in [*sorted({r.category for r in kept} | {entry.category for entry in drops}), "all"]:
            lengths = [len(r.response_ids) for r in kept if category in (r.category, "all")]
            flags = [r.flags for r in kept if category in (r.category, "all")]
            flags += [entry.flags for entry in drops if category in (entry.category, "all")]
            shares = [f"{sum(flag in found for found in flags) / len(flags):.0%}" for flag in FLAGS]
            mean = f"{sum(lengths) / max(len(lengths), 1):.0f}"
            table.add_row(split, category, str(len(lengths)), str(len(flags) - len(lengths)), mean, *shares)
        table.add_section()
        notes += [f"{split}: without a response: {n}, {why}" for why, n in counts["skipped"].items()]
        dropped = {flag: n["dropped"] for flag, n in counts["flagged"].items() if n["dropped"]}
        notes += [f"{split}: dropped as {flag}: {n}" for flag, n in dropped.items()]
    Console().print(table)
    for note in notes:
        print(note)
