"""`harvest.py --dry-run`: what the states of a recipe will cost, before anything is spent.

Sequences, tokens and bytes are exact once the responses exist, and an upper bound before (every answer as long as
responses.max_tokens allows). Hours follow from a rate that somebody measured: yours (`--tokens-per-second`), or one
of MEASURED for exactly that target. There is no third way here: a rate guessed from a data sheet would look like one
that was measured.

Shapes: T tokens, R rows that can carry loss, H hidden, N taps.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from drafthead.config import Recipe
from drafthead.data.prompts import KIND as PROMPTS
from drafthead.data.prompts import read_prompts
from drafthead.data.reading import Said
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.responses import read_responses
from drafthead.generation.asking import Request, continuation, prepare
from drafthead.generation.dialogue import open_dialogue
from drafthead.generation.keeping import Keeper
from drafthead.generation.parts import load_tokenizer
from drafthead.generation.regenerate import is_answered
from drafthead.models.target import TargetSpec, captured_ids, check_tap_ids, compute_dtype, load_target_spec
from drafthead.progress import progress_bar
from drafthead.provenance import MANIFEST, require

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Rate:
    """Harvested tokens per second, and where the number comes from."""

    tokens_per_second: float
    source: str


# By target.path. Add a line only with a run behind it.
MEASURED = {
    "data_gen/tiny/target": Rate(
        5355, "python data_gen/harvest.py, vLLM 0.32 on 2 CPU cores, 138,417 tokens, start included, 2026-11-21"
    ),
}


@dataclass(frozen=True)
class Text:
    """Length of one sequence: tokens before the response, of the response, and after it."""

    prompt: int
    response: int
    after: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.response + self.after

    @property
    def rows(self) -> int:
        """Rows that can carry loss: from two before the first generated token on (see core.layout)."""
        return self.response + self.after + min(self.prompt, 2) if self.response else 0


@dataclass(frozen=True)
class Estimate:
    """What one split costs.

    Attributes:
        split: "train" or "validation".
        exact: whether the responses exist; otherwise everything is an upper bound.
        sequences, tokens: to be stored, of one epoch.
        passes: how often they are harvested; a spool harvests every epoch anew.
        disk_bytes: on disk at once.
        kept_bytes: of host memory, about, in which an engine keeps states until a part is answered.
    """

    split: str
    exact: bool
    sequences: int
    tokens: int
    passes: int
    disk_bytes: int
    kept_bytes: int = 0


def estimate(recipe: Recipe) -> list[Estimate]:
    """The cost of both splits; no model is loaded and nothing is written.

    Raises:
        ArtefactError: there are neither responses nor prompts.
        FileNotFoundError: the target is missing.
        ValueError: a tap lies beyond the target.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision, recipe.target.trust_remote_code)
    check_tap_ids(spec, recipe.target.tap_ids)
    return [_estimate_split(recipe, spec, split) for split in SPLITS]


def _estimate_split(recipe: Recipe, spec: TargetSpec, split: str) -> Estimate:
    exact = (recipe.responses_dir(split) / MANIFEST).exists()
    texts = _texts_of_responses(recipe, split) if exact else _texts_of_prompts(recipe, split)
    size = recipe.states.sequences_per_shard
    shards = [stored_bytes(recipe, spec, texts[start : start + size]) for start in range(0, len(texts), size)]
    online = split == "train" and recipe.states.spool_shards is not None
    at_once = sorted(shards, reverse=True)[: recipe.states.spool_shards] if online else shards
    passes = recipe.train.epochs if online else 1
    tokens = sum(text.tokens for text in texts)
    kept = _kept_bytes(recipe, spec, split, tokens) if recipe.states.one_pass and not exact else 0
    return Estimate(split, exact, len(texts), tokens, passes, sum(at_once), kept)


def _kept_bytes(recipe: Recipe, spec: TargetSpec, split: str, tokens: int) -> int:
    """Captured rows of a part of mean length: every boundary of every token, until its answers have been judged."""
    boundaries = len(captured_ids(spec, recipe.target.tap_ids))
    width = compute_dtype(spec, recipe.target.dtype).itemsize
    share = min(1.0, recipe.responses.prompts_per_part / len(read_prompts(recipe.prompts_dir, split)))
    return round(tokens * share * boundaries * spec.hidden_size * width)


def stored_bytes(recipe: Recipe, spec: TargetSpec, texts: Sequence[Text]) -> int:
    """Size of the shard that holds these texts, but for its header of some kilobytes (see data.shard)."""
    width = compute_dtype(spec, recipe.target.dtype).itemsize
    taps, fp8 = recipe.target.tap_ids, recipe.states.format == "fp8"
    per_tap = spec.hidden_size + 4 if fp8 else spec.hidden_size * width
    per_token = len(taps) * per_tap + 4 + 1  # with id and mask
    separate = fp8 or spec.num_layers not in taps
    per_row = (spec.hidden_size * width if separate else 0) + 4 + 4  # with argmax and lse
    tokens, rows = sum(text.tokens for text in texts), sum(text.rows for text in texts)
    return tokens * per_token + rows * per_row + 16 * (len(texts) + 1)


def print_estimate(recipe: Recipe, tokens_per_second: float | None) -> None:
    """Print the estimate of a recipe.

    Args:
        recipe: to be harvested.
        tokens_per_second: measured by the user, of one engine: several take less time and cost the same.

    Raises:
        ValueError: the rate is not positive.
    """
    if tokens_per_second is not None and tokens_per_second <= 0:
        raise ValueError(f"--tokens-per-second {tokens_per_second:g} must be positive")
    found = estimate(recipe)
    for one in found:
        bound = "" if one.exact else "at most "
        again = f" x {one.passes} epochs" if one.passes > 1 else ""
        per_token = one.disk_bytes / max(one.tokens, 1)
        density = f" ({per_token:,.0f} bytes per token in {recipe.states.format})" if one.passes == 1 else " at once"
        print(
            f"{one.split:<10} {one.sequences:,} sequences, {bound}{one.tokens:,} tokens{again}, "
            f"{bound}{_size(one.disk_bytes)} on disk{density}"
        )
    wanted, free = sum(one.disk_bytes for one in found), _free_bytes(recipe.directory())
    short = "" if wanted <= free else f": {_size(wanted - free)} too little"
    print(f"disk       {_size(wanted)} wanted, {_size(free)} free in {recipe.directory()}{short}")
    if not all(one.exact for one in found):
        print(f"no responses yet: every answer counted with responses.max_tokens {recipe.responses.max_tokens}")
    if kept := max(one.kept_bytes for one in found):
        print(
            "one pass   states are captured while the target answers and take no hours of their own\n"
            f"memory     about {_size(kept)} of the host for each engine, until a part is answered; lower "
            f"responses.prompts_per_part {recipe.responses.prompts_per_part} for less"
        )
        return
    print(_time_and_price(recipe, found, tokens_per_second))


def _time_and_price(recipe: Recipe, found: Sequence[Estimate], tokens_per_second: float | None) -> str:
    given = Rate(tokens_per_second, "--tokens-per-second") if tokens_per_second else None
    rate = given or MEASURED.get(recipe.target.path)
    if rate is None:
        return (
            f"hours and price: no rate was measured for {recipe.target.path}; harvest a few hundred sequences "
            "(prompts.max_train=..., another name=...), read tokens/s off its last lines and pass --tokens-per-second"
        )
    bound = "" if all(one.exact for one in found) else "at most "
    hours = sum(one.tokens * one.passes for one in found) / rate.tokens_per_second / 3600
    clock = timedelta(seconds=round(hours * 3600))
    line = f"time       {bound}{hours:,.1f} hours ({clock}) at {rate.tokens_per_second:,.0f} tokens/s ({rate.source})"
    if (price := recipe.eval.price_per_gpu_hour) is None:
        return f"{line}\nprice      not known: set eval.price_per_gpu_hour"
    gpus = recipe.engine.tensor_parallel_size
    return f"{line}\nprice      {bound}{hours * price * gpus:,.2f} at {price:,.2f} per GPU and hour, {gpus} GPUs"


def _size(num_bytes: int) -> str:
    """In GiB, or in MiB below one."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def _free_bytes(directory: Path) -> int:
    """Free space where a directory is or will be."""
    return shutil.disk_usage(next(p for p in (directory, *directory.parents) if p.exists())).free


def _texts_of_responses(recipe: Recipe, split: str) -> list[Text]:
    require(recipe.responses_dir(split), RESPONSES, "python data_gen/regenerate.py RECIPE")
    return [
        Text(len(r.prompt_ids), len(r.response_ids), len(r.continuation_ids))
        for r in read_responses(recipe.responses_dir(split))
    ]


def _texts_of_prompts(recipe: Recipe, split: str) -> list[Text]:
    require(recipe.prompts_dir, PROMPTS, "python data_gen/prompts.py RECIPE")
    tokenizer, prompts = load_tokenizer(recipe), read_prompts(recipe.prompts_dir, split)
    if not is_answered(recipe, split):
        with progress_bar(len(prompts), "reading answers", "prompt") as bar:
            kept, _ = Keeper(recipe, tokenizer).keep(prompts, bar)
        return [Text(len(response.prompt_ids), len(response.response_ids)) for response in kept]
    texts: list[Text] = []
    dialogues = [open_dialogue(prompt, recipe.responses.turn_by_turn) for prompt in prompts]
    while dialogues:
        requests, _ = prepare(recipe, tokenizer, split, dialogues)
        texts += [_longest(recipe, split, request) for request in requests]
        # Counted above with answers of max_tokens; a word stands for them in what is rendered.
        dialogues = [later for request in requests if (later := request.dialogue.after(Said("yes")))]
    return texts


def _longest(recipe: Recipe, split: str, request: Request) -> Text:
    """A question with the longest answers before it that the engine has room for."""
    after = continuation(recipe, split)
    room = recipe.engine.max_model_len - 1 - after - request.max_tokens
    earlier = request.dialogue.turn * recipe.responses.max_tokens
    return Text(min(len(request.prompt_ids) + earlier, room), request.max_tokens, after)
