"""The dry runs of all stages of a recipe in one table: GPUs, memory per GPU, disk, hours and price.

    python data_gen/dry_run.py [RECIPE] [section.key=value ...]
                               [--prompts N] [--prompt-tokens N] [--answer-tokens N] [--gpus N] [--gpu NAME]

Of the target only config.json is needed. What exists already is counted; what does not is assumed, and the lines below
the table say which is which. Rates that nobody measured come from a data sheet and are marked so; a rate of your own
goes to its stage, such as --harvest-rate 20000 (tokens per second of one engine, or of the whole training).
"""

from dataclasses import replace

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.evaluation.measuring.forecast import eval_plan
from drafthead.exporting.plan import export_plan
from drafthead.generation.plans.answers import answer_plan
from drafthead.generation.plans.estimate import harvest_plan
from drafthead.generation.plans.texts import Texts, conversations, texts_of
from drafthead.provenance import MANIFEST
from drafthead.stage_plan import AMOUNTS, GPU, GPUS, Assumed, StagePlan, assumed_from, print_stages
from drafthead.training.plan import TrainAmount, train_plan

STAGES = ("regenerate", "harvest", "train", "evaluate")
RATES = tuple(
    (f"--{stage}-rate", {"type": float, "metavar": "RATE", "help": f"measured tokens per second of {stage}"})
    for stage in STAGES
)


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *AMOUNTS, GPU, GPUS, *RATES)
    rates = {stage: getattr(args, f"{stage}_rate") for stage in STAGES}
    print_stages(all_stages(recipe, assumed_from(args), rates), f"{recipe.name}: what it will take")


def all_stages(recipe: Recipe, assumed: Assumed, rates: dict[str, float | None]) -> list[StagePlan]:
    """The plan of every stage, in order.

    Args:
        recipe: to be planned.
        assumed: for all stages; its GPUs are those of harvest and training.
        rates: stage -> measured tokens per second, or None.
    """
    texts = [texts_of(recipe, split, assumed) for split in ("train", "validation")]
    by_stage = {stage: replace(assumed, tokens_per_second=rates[stage]) for stage in STAGES}
    return [
        prompts_plan(recipe, assumed),
        answer_plan(recipe, by_stage["regenerate"], texts),
        harvest_plan(recipe, by_stage["harvest"], texts),
        train_plan(recipe, by_stage["train"], _learned_from(texts[0])),
        export_plan(recipe, assumed),
        eval_plan(recipe, by_stage["evaluate"]),
    ]


def prompts_plan(recipe: Recipe, assumed: Assumed) -> StagePlan:
    """Drawing them takes no GPU, and minutes."""
    drawn = (recipe.prompts_dir / MANIFEST).exists()
    count = len(read_prompts(recipe.prompts_dir, "train")) if drawn else conversations(recipe, assumed)
    note = () if drawn else ("disk: without the data sets that are downloaded",)
    text_bytes = 5 * assumed.prompt_tokens * count  # about five characters a token
    return StagePlan("prompts", f"{count:,} conversations to train on", disk_bytes=text_bytes, notes=note)


def _learned_from(train: Texts) -> TrainAmount:
    return TrainAmount(len(train.texts), train.tokens, sum(text.rows for text in train.texts))


if __name__ == "__main__":
    run_recipe(main)
