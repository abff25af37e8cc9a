"""The recipe: everything about one head, in one typed and strict YAML file.

A recipe has one section per stage. An unknown key, a wrong type or an impossible combination is an
error before any work starts. Values can be overridden on the command line with dotted keys
(`train.learning_rate=1e-3`). What this gives up is free-form configuration: a knob exists only when
it is declared and documented here.
"""

from drafthead.config.loading import load_recipe
from drafthead.config.recipe import (
    DEFAULT_RECIPE,
    REPO_ROOT,
    PromptsConfig,
    PromptSource,
    Recipe,
    ResponsesConfig,
    local_or_hub,
)  # fmt: skip
from drafthead.config.train import TrainConfig
from drafthead.drafters.config import HeadConfig

__all__ = [
    "DEFAULT_RECIPE",
    "REPO_ROOT",
    "HeadConfig",
    "PromptSource",
    "PromptsConfig",
    "Recipe",
    "ResponsesConfig",
    "TrainConfig",
    "load_recipe",
    "local_or_hub",
]
