"""`eval/head.py --dry-run`: engines and servers that an evaluation starts, requests, hours and price.

Methods with a draft are counted at the speed of the baseline: what they bring is the question. A rate is that of one
engine with engine.max_num_seqs requests under way; at fewer it is scaled as the data sheet of the GPU has it.
"""

from dataclasses import dataclass

from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.drafters.eagle3.model import num_parameters, planned_shape
from drafthead.engine.engine_plan import EnginePlan
from drafthead.engine.rates import Rate, known_rate, start_seconds
from drafthead.evaluation.measuring.acceptance import by_engine, conditions
from drafthead.evaluation.measuring.plan import Level, Plan, recipe_plan
from drafthead.provenance import MANIFEST
from drafthead.stage_plan import Assumed, StagePlan

_ROW_BYTES = 8_000  # of a request in the Parquet files, its response's ids included


@dataclass(frozen=True)
class Requests:
    """What every request of an evaluation is counted as.

    Attributes:
        prompt, response: tokens.
        prompts: held-out ones.
        known: whether the prompts exist.
    """

    prompt: int
    response: int
    prompts: int
    known: bool


def eval_plan(recipe: Recipe, assumed: Assumed, plan: Plan | None = None) -> StagePlan:
    """Acceptance and serving of a recipe as one stage.

    Args:
        recipe: methods, loads, temperatures, repeats.
        assumed: lengths, and the rate of one engine with all of engine.max_num_seqs requests under way.
        plan: of the servers; None: the recipe's.

    Raises:
        FileNotFoundError: the target's config.json is missing.
    """
    plan = plan or recipe_plan(recipe)
    each, engine = _requests(recipe, assumed), EnginePlan(recipe, assumed, 2 * num_parameters(planned_shape(recipe)))
    found = conditions(recipe)
    engines, responses = len(by_engine(found)), sum(c.passes * each.prompts for c in found)
    own = [run for run in plan.runs if not run.endpoint]
    length = each.prompt + each.response
    full = engine.under_way(length)
    rate = _rate(recipe, assumed, engine, each, full)
    offline = responses * each.response / rate.tokens_per_second
    loaded = sum(_seconds(level, engine, each, rate, full) for run in plan.runs for level in run.levels)
    start = start_seconds(recipe)
    starts = (engines + len(own)) * start.seconds
    requests = sum(level.prompts for run in plan.runs for level in run.levels)
    loads = len({level.name for run in plan.runs for level in run.levels})
    blocks = len({run.block for run in plan.runs})
    bound = "" if assumed.answer_tokens else "at most "
    return StagePlan(
        stage="evaluate",
        work=f"{engines} engines for {responses:,} responses; {len(own)} servers ({blocks} blocks) x {loads} loads, "
        f"{requests:,} requests",
        gpus=engine.gpus,
        memory_bytes=engine.memory_bytes(length, full),
        disk_bytes=(responses + requests) * _ROW_BYTES,
        hours=(offline + loaded + starts) / 3600,
        rate=f"{rate}, {full} at once; less at smaller loads",
        price_per_gpu_hour=recipe.eval.price_per_gpu_hour,
        notes=(
            f"{bound}{each.response:,} tokens a response, drafting not counted as faster; "
            + f"{each.prompts:,} held-out prompts"
            + ("" if each.known else ", not drawn yet"),
            f"{engines + len(own)} starts of {start}: {starts / 3600:.2f} of the hours",
            *engine.notes(length),
        ),
    )


def _requests(recipe: Recipe, assumed: Assumed) -> Requests:
    settings = recipe.eval
    known = (recipe.prompts_dir / MANIFEST).exists()
    declared = recipe.prompts.max_heldout or sum(source.heldout for source in recipe.prompts.sources or ())
    count = len(read_prompts(recipe.prompts_dir, "heldout")) if known else declared or settings.prompts_per_level
    response = min(settings.max_tokens, assumed.answer_tokens or settings.max_tokens)
    return Requests(min(assumed.prompt_tokens, recipe.engine.max_model_len - response - 1), response, count, known)


def _rate(recipe: Recipe, assumed: Assumed, engine: EnginePlan, each: Requests, full: int) -> Rate:
    """Output tokens per second, prompts included, with all places taken."""
    if known := known_rate(recipe, "regenerate", assumed.tokens_per_second):
        return known
    decode, prefill = engine.decode(each.prompt + each.response / 2, full), engine.prefill()
    seconds = each.response / decode.tokens_per_second + each.prompt / prefill.tokens_per_second
    return Rate(each.response / seconds, decode.source)


def _seconds(level: Level, engine: EnginePlan, each: Requests, rate: Rate, full: int) -> float:
    """One level of one server: as long as its responses take, or as long as its requests take to come."""
    places = min(level.load.concurrency or full, full)
    context = each.prompt + each.response / 2
    scale = engine.decode(context, places).tokens_per_second / engine.decode(context, full).tokens_per_second
    decoding = level.prompts * min(level.max_tokens, each.response) / (rate.tokens_per_second * scale)
    coming = level.prompts / level.load.request_rate if level.load.request_rate else 0
    return max(decoding, coming)
