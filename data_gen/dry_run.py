"""The dry runs of all stages of a recipe in one table: GPUs, memory per GPU, disk, and hours where a rate is given.

    python data_gen/dry_run.py [RECIPE] [section.key=value ...]
                               [--prompts N] [--prompt-tokens N] [--response-tokens N] [--gpus N] [--gpu-memory-gib N]

Of the target only config.json is needed. What exists already is counted; what does not is assumed, and the lines below
the table say which is which. Hours come from rates that you measured, such as --harvest-rate 20000 (tokens per second
of one engine, or of the whole training); a stage without one has none.
"""

from dataclasses import replace

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe
from drafthead.planning import AMOUNTS, GPU_MEMORY, GPUS, Assumed, StagePlan, assumed_from, print_plans
from drafthead.planning.lengths import all_lengths
from drafthead.planning.stages import eval_plan, export_plan, harvest_plan, prompts_plan, regenerate_plan, train_plan

RATES = tuple(
    (f"--{stage}-rate", {"type": float, "metavar": "RATE", "help": f"measured tokens per second of {stage}"})
    for stage in ("regenerate", "harvest", "train", "evaluate")
)


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *AMOUNTS, GPU_MEMORY, GPUS, *RATES)
    rates = {name.removesuffix("_rate"): value for name, value in vars(args).items() if name.endswith("_rate")}
    print_plans(all_stages(recipe, assumed_from(args), rates), f"{recipe.name}: what it will take")


def all_stages(recipe: Recipe, assumed: Assumed, rates: dict[str, float | None]) -> list[StagePlan]:
    """The plan of every stage, in order.

    Args:
        recipe: to be planned.
        assumed: for all stages; its GPUs are those of harvest and training.
        rates: stage -> measured tokens per second; a stage may be missing.
    """
    lengths = all_lengths(recipe, assumed)

    def given(stage: str) -> Assumed:
        return replace(assumed, tokens_per_second=rates.get(stage))

    return [
        prompts_plan(recipe, assumed),
        regenerate_plan(recipe, given("regenerate"), lengths),
        harvest_plan(recipe, given("harvest"), lengths),
        train_plan(recipe, given("train"), lengths[0].tokens),
        export_plan(recipe, assumed),
        eval_plan(recipe, given("evaluate")),
    ]


if __name__ == "__main__":
    run_recipe(main)
