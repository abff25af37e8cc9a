"""The W&B run of a recipe: training opens it, a resumed training continues it, evaluation adds its results to it.

Its id is made once and kept in the run's directory, so that it ends with the run. Without a network
(`WANDB_MODE=offline`) every start writes a folder of its own under `runs/NAME/wandb`; `wandb sync` joins them by
the id.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafthead.config import Recipe
from drafthead.files import atomic_path


def wandb_run(recipe: Recipe) -> dict[str, Any]:
    """What `wandb.init` takes beside the project: name of the recipe, grouped by target."""
    path = recipe.run_dir / "wandb" / "run-id"
    if not path.exists():
        with atomic_path(path) as temporary:
            temporary.write_text(secrets.token_hex(8))
    return {
        "name": recipe.name,
        "group": recipe.target.path,
        "id": path.read_text(),
        "resume": "allow",
        "dir": str(recipe.run_dir),  # it would write into the checkout
    }


def log_results(recipe: Recipe, figures: Mapping[str, Any], page: Path) -> None:
    """Add figures and a report to the W&B run that trained the head; nothing where the recipe has another tracker."""
    if recipe.train.tracker != "wandb":
        return
    import wandb

    with wandb.init(project=recipe.name, **wandb_run(recipe)) as run:
        run.summary.update(dict(figures))
        run.log({"evaluation/report": wandb.Html(page.read_text(encoding="utf-8"))})
