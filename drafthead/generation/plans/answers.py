"""`regenerate.py --dry-run`: what the answers of a recipe will take, before an engine is started."""

from drafthead.config import Recipe
from drafthead.engine.engine_plan import EnginePlan
from drafthead.engine.rates import Rate, known_rate
from drafthead.generation.plans.texts import Texts, amount_notes, texts_of
from drafthead.generation.regenerate import SPLITS, is_regenerated
from drafthead.stage_plan import Assumed, StagePlan
from drafthead.target.pieces import check_aux_layer_ids, load_target_spec

_STORED_BYTES = 8  # of a token: its id and its text, before Parquet packs them


def answer_plan(recipe: Recipe, assumed: Assumed, found: list[Texts] | None = None) -> StagePlan:
    """Sequences, tokens, memory of the engine, hours and price of regeneration.

    Args:
        recipe: whose prompts are answered; nothing on disk is needed but the target's config.json.
        assumed: where prompts or answers do not exist yet.
        found: the texts, where the caller has them.

    Raises:
        FileNotFoundError: the target's config.json is missing.
        ValueError: the recipe does not fit it.
    """
    check_aux_layer_ids(
        load_target_spec(recipe.target_path, recipe.target.revision),
        recipe.target.aux_layer_ids,
    )
    found = found or [texts_of(recipe, split, assumed) for split in SPLITS]
    answered = [one for one in found if is_regenerated(recipe, one.split)]
    sequences = sum(len(one.texts) for one in answered)
    said, read = sum(one.answers for one in answered), sum(one.tokens - one.answers for one in answered)
    engine = EnginePlan(recipe, assumed)
    length = (said + read) / max(sequences, 1)
    under_way = engine.under_way(length)
    hours, rate = _hours(recipe, assumed, engine, said, read, under_way, sequences)
    bound = "" if all(one.exact for one in answered) or assumed.answer_tokens else "at most "
    return StagePlan(
        stage="regenerate",
        work=f"{sequences:,} answers, {bound}{said:,} tokens after {read:,} of prompts",
        gpus=engine.gpus,
        memory_bytes=engine.memory_bytes(length, under_way),
        disk_bytes=_STORED_BYTES * sum(one.tokens for one in found),
        hours=hours,
        rate=str(rate),
        price_per_gpu_hour=recipe.eval.price_per_gpu_hour,
        notes=(*amount_notes(recipe, found[0], assumed), *engine.notes(length), *_server_note(recipe)),
    )


def _hours(
    recipe: Recipe, assumed: Assumed, engine: EnginePlan, said: int, read: int, under_way: int, sequences: int
) -> tuple[float, Rate]:
    """A measured rate is of tokens said, prompts included; an assumed one reads and says in turn."""
    rate = known_rate(recipe, "regenerate", assumed.tokens_per_second)
    if rate is not None:
        return said / rate.tokens_per_second / 3600, rate
    context = (read + said / 2) / max(sequences, 1)
    decode, prefill = engine.decode(context, under_way), engine.prefill()
    seconds = said / decode.tokens_per_second + read / prefill.tokens_per_second
    return seconds / 3600, Rate(said / max(seconds, 1e-9), f"{decode.source}, {under_way} at once")


def _server_note(recipe: Recipe) -> tuple[str, ...]:
    url = recipe.responses.server_url
    return (f"the GPUs are those of the server at {url}",) if url else ()
