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
from drafthead.evaluation.measuring.conditions import by_engine, conditions
from drafthead.evaluation.measuring.plan import Level, Plan, recipe_plan
from drafthead.provenance import MANIFEST
from drafthead.stage_plan import Assumed, StagePlan

_ROW_BYTES = 8_000  # of a request in the Parquet files, its answer's ids included


@dataclass(frozen=True)
class Asked:
    """What every request of an evaluation is counted as.

    Attributes:
        prompt, answer: tokens.
        prompts: held-out ones.
        known: whether the prompts exist.
    """

    prompt: int
    answer: int
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
    asked, engine = _asked(recipe, assumed), EnginePlan(recipe, assumed, 2 * num_parameters(planned_shape(recipe)))
    found = conditions(recipe)
    engines, answers = len(by_engine(found)), sum(c.passes * asked.prompts for c in found)
    own = [run for run in plan.runs if not run.endpoint]
    length = asked.prompt + asked.answer
    full = engine.under_way(length)
    rate = _rate(recipe, assumed, engine, asked, full)
    offline = answers * asked.answer / rate.tokens_per_second
    loaded = sum(_seconds(level, engine, asked, rate, full) for run in plan.runs for level in run.levels)
    each = start_seconds(recipe)
    starts = (engines + len(own)) * each.seconds
    requests = sum(level.prompts for run in plan.runs for level in run.levels)
    loads = len({level.name for run in plan.runs for level in run.levels})
    blocks = len({run.block for run in plan.runs})
    bound = "" if assumed.answer_tokens else "at most "
    return StagePlan(
        stage="evaluate",
        work=f"{engines} engines for {answers:,} answers; {len(own)} servers ({blocks} blocks) x {loads} loads, "
        f"{requests:,} requests",
        gpus=engine.gpus,
        memory_bytes=engine.memory_bytes(length, full),
        disk_bytes=(answers + requests) * _ROW_BYTES,
        hours=(offline + loaded + starts) / 3600,
        rate=f"{rate}, {full} at once; less at smaller loads",
        price_per_gpu_hour=recipe.eval.price_per_gpu_hour,
        notes=(
            f"{bound}{asked.answer:,} tokens an answer, drafting not counted as faster; "
            + f"{asked.prompts:,} held-out prompts"
            + ("" if asked.known else ", not drawn yet"),
            f"{engines + len(own)} starts of {each}: {starts / 3600:.2f} of the hours",
            *engine.notes(length),
        ),
    )


def _asked(recipe: Recipe, assumed: Assumed) -> Asked:
    settings = recipe.eval
    known = (recipe.prompts_dir / MANIFEST).exists()
    declared = recipe.prompts.max_heldout or sum(source.heldout for source in recipe.prompts.sources or ())
    count = len(read_prompts(recipe.prompts_dir, "heldout")) if known else declared or settings.prompts_per_level
    answer = min(settings.max_tokens, assumed.answer_tokens or settings.max_tokens)
    return Asked(min(assumed.prompt_tokens, recipe.engine.max_model_len - answer - 1), answer, count, known)


def _rate(recipe: Recipe, assumed: Assumed, engine: EnginePlan, asked: Asked, full: int) -> Rate:
    """Tokens said per second, prompts included, with all places taken."""
    if known := known_rate(recipe, "regenerate", assumed.tokens_per_second):
        return known
    decode, prefill = engine.decode(asked.prompt + asked.answer / 2, full), engine.prefill()
    seconds = asked.answer / decode.tokens_per_second + asked.prompt / prefill.tokens_per_second
    return Rate(asked.answer / seconds, decode.source)


def _seconds(level: Level, engine: EnginePlan, asked: Asked, rate: Rate, full: int) -> float:
    """One level of one server: as long as its answers take, or as long as its requests take to come."""
    places = min(level.load.concurrency or full, full)
    context = asked.prompt + asked.answer / 2
    scale = engine.decode(context, places).tokens_per_second / engine.decode(context, full).tokens_per_second
    said = level.prompts * min(level.max_tokens, asked.answer) / (rate.tokens_per_second * scale)
    coming = level.prompts / level.load.request_rate if level.load.request_rate else 0
    return max(said, coming)
