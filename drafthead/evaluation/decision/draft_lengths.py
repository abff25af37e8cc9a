"""A schedule of draft lengths, proposed by the cost model and then served beside the fixed lengths it is made of.

Served in blocks of opposite order and with the same prompts at every load. At a single load a schedule can at best
equal the length that is best there: what it gains, it gains over a traffic of several loads.
"""

from drafthead.config import Recipe
from drafthead.config.evaluation import ALL, OWN, MethodConfig
from drafthead.evaluation.decision.analysis import verdicts_of
from drafthead.evaluation.decision.cost_model import fit
from drafthead.evaluation.decision.speed import speed_samples
from drafthead.evaluation.decision.variants import KEY, Schedule, Variant, best_schedule, compare_variants
from drafthead.evaluation.measuring.plan import recipe_plan, served_recipe
from drafthead.evaluation.measuring.serving import measure_serving
from drafthead.evaluation.results.levels import Level, read_serving, steady, summarise_serving
from drafthead.evaluation.workload import HEAD

SCHEDULED = "schedule"
BLOCKS = 2  # A B, B A: at the least


def modelled_schedule(recipe: Recipe) -> Schedule:
    """Measure the recipe's fixed draft lengths, and let the cost model fill in a schedule.

    Raises:
        ValueError: a single draft length or load, from which no schedule follows.
    """
    settings = recipe.eval
    if len(settings.draft_tokens) < 2 or len(settings.concurrency) < 2:
        raise ValueError(
            f"a schedule chooses between draft lengths by load: eval.num_draft_tokens {list(settings.draft_tokens)} "
            f"and eval.concurrency {list(settings.concurrency)} need two values each, such as [3,1] and [1,32]"
        )
    fixed = _serving(recipe, served=(HEAD,))
    directory = recipe.results_dir / "draft-lengths" / "fixed"
    rows = steady(read_serving(measure_serving(fixed, recipe_plan(fixed), directory)))
    limit = served_recipe(fixed).engine.max_num_seqs
    samples = speed_samples(rows, HEAD, limit)
    return best_schedule(fit(samples.points(), samples.positions), limit)


def measure_schedule(recipe: Recipe, schedule: Schedule) -> list[Level]:
    """Serve the schedule beside every fixed draft length, in results/NAME/draft-lengths/schedule.

    Raises:
        ValueError: the schedule has one draft length, or one beyond the recipe's.
    """
    lengths = {K for _, _, K in schedule}
    longest = max(recipe.eval.draft_tokens)
    if len(lengths) == 1 or max(lengths) > longest:
        raise ValueError(
            f"schedule {schedule}: nothing to compare with a single draft length, and none may be above "
            f"{longest}, the longest of eval.num_draft_tokens; give another with --schedule '[[1,2,3],[3,64,1]]'"
        )
    beside = _serving(with_schedule(recipe, schedule), served=(HEAD, SCHEDULED))
    directory = recipe.results_dir / "draft-lengths" / "schedule"
    return summarise_serving(read_serving(measure_serving(beside, recipe_plan(beside), directory)))


def with_schedule(recipe: Recipe, schedule: Schedule) -> Recipe:
    """The recipe with the schedule as a method, at the longest draft length."""
    longest = (max(recipe.eval.draft_tokens),)
    method = MethodConfig(name=SCHEDULED, method=OWN, num_draft_tokens=longest, extra={KEY: schedule})
    others = [own for own in recipe.eval.methods if own.name != SCHEDULED]
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": (*others, method)})})


def compare_schedule(recipe: Recipe, schedule: Schedule, levels: list[Level]) -> Variant:
    """The schedule beside the best fixed draft length, over the recipe's traffic."""
    recipe = with_schedule(recipe, schedule)
    verdicts = verdicts_of(recipe, levels, {})
    found = compare_variants(recipe, verdicts[0].workload, verdicts, levels)
    return next(variant for variant in found if variant.verdict.method == SCHEDULED)


def _serving(recipe: Recipe, served: tuple[str, ...]) -> Recipe:
    """The recipe with nothing served but these methods, at loads of fixed concurrency, in blocks."""
    update = {
        "served": served,
        "loads": (),
        "workloads": ALL,
        "repeats": max(BLOCKS * (len(served) > 1), recipe.eval.repeats),
    }
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update=update)})
