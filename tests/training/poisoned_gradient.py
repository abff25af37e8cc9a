"""The training recipe with one addition: from the third backward on, the gradient of fc is infinite."""

from drafthead.cli import run_recipe
from drafthead.drafters.base import Drafter
from train.eagle3 import main

_plain_build = Drafter.from_target


def _build_poisoned(*args, **kwargs):
    model = _plain_build(*args, **kwargs)
    backwards = []

    def poison(gradient):
        backwards.append(1)
        return gradient * float("inf") if len(backwards) > 2 else gradient

    model.fc.weight.register_hook(poison)
    return model


if __name__ == "__main__":
    Drafter.from_target = _build_poisoned
    run_recipe(main)
