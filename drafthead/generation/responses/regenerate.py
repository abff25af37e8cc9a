"""The target answers the training and validation prompts, so that a head learns the text it will be asked to draft.

Training prompts are answered at a temperature drawn for each conversation, validation prompts greedily and K tokens
past the stop, because acceptance is replayed over the target's own T = 0 text (K = head.num_ttt_steps). A part is
the unit of work: a fixed slice of the prompts, skipped when present. Temperature, effort and seed follow from
responses.seed and the prompt's id alone. Given up: the same text on other hardware or another batch; bf16 sums depend
on both.

Chats are answered turn by turn (generation.turns); with responses.regenerate false the training split keeps the
answers of the data instead (generation.keeping). Left out and counted: what leaves no room in engine.max_model_len,
what cannot be rendered for this target (data.rendering), and answers that the recipe drops (generation.judging).
A chat template that writes the date (gpt-oss) makes prompts of different days differ; the manifest says when it was
made. Pre-tokenised prompts are read as they are: the reasoning effort noted with them was drawn but is not in them.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from drafthead.config import Recipe
from drafthead.data.prompts import KIND as PROMPTS
from drafthead.data.rendering import reads_clock, template_day
from drafthead.data.responses import (
    KIND,
    LeftOut,
    Response,
    iter_responses,
    read_left_out,
    read_makers,
    read_part,
    write_part,
)
from drafthead.generation.responses.asking import continuation
from drafthead.generation.responses.judging import FLAGS
from drafthead.generation.responses.keeping import Keeper
from drafthead.generation.responses.parts import Part, answering_parts, list_parts
from drafthead.generation.running import Runner, run_here
from drafthead.generation.states.one_pass import claim_waiting_room
from drafthead.progress import progress_bar
from drafthead.provenance import ArtefactError, begin, finish, reference, require
from drafthead.target.pieces import TargetSpec, check_aux_layer_ids, load_target_spec, target_identity
from drafthead.target.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "validation")


def regenerate(recipe: Recipe, run: Runner = run_here) -> None:
    """Make the responses artefacts of both splits; finished parts are kept, and no engine starts when all are.

    Args:
        recipe: what to answer.
        run: makes the parts.

    Raises:
        ArtefactError: there are no prompts, or a directory holds responses made from something else.
        FileNotFoundError: the target is missing.
        ValueError: the target does not fit the recipe, no prompt of a split can be answered, the server cannot be
            used, or answers are to be kept and the chat template gives no stable boundaries.
    """
    if recipe.responses.server_url and run is not run_here:
        raise ValueError(
            f"responses.server_url {recipe.responses.server_url} answers by itself, at engine.max_num_seqs "
            f"{recipe.engine.max_num_seqs} requests at a time: leave out --cluster, or the URL for engines of our own"
        )
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    prompts = require(recipe.prompts_dir, PROMPTS, "python data_gen/prompts.py RECIPE", every_byte=True)
    _check_answers(recipe, prompts)
    tokenizer = load_tokenizer(recipe, templated=True)
    day = {"template_day": str(template_day(recipe))} if reads_clock(tokenizer) else {}
    unfinished = [
        split
        for split in SPLITS
        if not begin(recipe.responses_dir(split), KIND, _identity(recipe, spec, prompts, split) | day)
    ]
    missing = [part for split in unfinished for part in list_parts(recipe, split) if not part.path.exists()]
    if to_keep := [part for part in missing if not is_answered(recipe, part.split)]:
        keep_parts(recipe, tokenizer, to_keep)
    if to_answer := [part for part in missing if is_answered(recipe, part.split)]:
        if recipe.states.one_pass:
            for split in {part.split for part in to_answer}:
                claim_waiting_room(recipe, spec, split)
        started = time.monotonic()
        run(recipe, answering_parts(recipe, spec), to_answer)
        tokens = sum(len(response.response_ids) for part in to_answer for response in read_part(part.path))
        print(f"generated {tokens:,} tokens at {tokens / (time.monotonic() - started):,.0f} tokens/s, start included")
    for split in unfinished:
        finish_split(recipe, split)


def keep_parts(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", parts: Sequence[Part]) -> None:
    """Write parts from the answers that the data has."""
    keeper = Keeper(recipe, tokenizer)
    with progress_bar(sum(len(part.prompts) for part in parts), "keeping answers", "prompt") as bar:
        for part in parts:
            write_part(part.path, *keeper.keep(part.prompts, bar), made_by={"data": "answers kept"})


def is_answered(recipe: Recipe, split: str) -> bool:
    """Whether the target answers a split: validation always, as acceptance is replayed over the target's own text."""
    return recipe.responses.regenerate or split == "validation"


def _check_answers(recipe: Recipe, prompts: dict[str, Any]) -> None:
    if not recipe.responses.regenerate and prompts["identity"].get("answers") != "kept":
        raise ArtefactError(
            f"responses.regenerate is false, but {recipe.prompts_dir} was written without the answers of its data; "
            "delete it and run: python data_gen/prompts.py RECIPE"
        )


def _identity(recipe: Recipe, spec: TargetSpec, prompts: dict[str, Any], split: str) -> dict[str, Any]:
    # A server may move to another address while it answers; who answered stands in every part.
    settings = recipe.responses.model_dump(exclude={"server_url", "server_model"})
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


def finish_split(recipe: Recipe, split: str) -> None:
    """Write the manifest over a split's parts.

    Raises:
        ValueError: they hold no answer.
    """
    directory = recipe.responses_dir(split)
    left_out = read_left_out(directory)
    counts = _counts(iter_responses(directory), left_out)
    if not counts["responses"]:
        raise ValueError(
            f"no {split} prompt could be answered: {_reasons(left_out)}; correct it and delete {directory}"
        )
    finish(directory, counts | {"answered_by": read_makers(directory)})


def _counts(responses: Iterable[Response], left_out: Sequence[LeftOut]) -> dict[str, Any]:
    drops = [entry for entry in left_out if entry.flags]
    kept: Counter[str] = Counter()
    flags: Counter[str] = Counter()
    for response in responses:
        kept["responses"] += 1
        kept["prompt_tokens"] += len(response.prompt_ids)
        kept["response_tokens"] += len(response.response_ids)
        flags.update(set(response.flags))
    return {
        "responses": kept["responses"],
        "skipped": _reasons([entry for entry in left_out if not entry.flags]),
        # Of all that was answered; an answer may have several flags, and one that a recipe drops is enough.
        "flagged": {
            flag: {"kept": flags[flag], "dropped": sum(flag in entry.flags for entry in drops)} for flag in FLAGS
        },
        "dropped": len(drops),
        "prompt_tokens": kept["prompt_tokens"],
        "response_tokens": kept["response_tokens"],
    }


def _reasons(left_out: Sequence[LeftOut]) -> dict[str, int]:
    """Reason -> answers that are missing."""
    counted: Counter[str] = Counter()
    for entry in left_out:
        counted[entry.reason] += entry.turns
    return dict(counted)
