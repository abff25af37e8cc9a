"""How small the chain is when it is run for the tests."""

from pathlib import Path

# Enough for a head that clearly beats its controls, small enough for a test.
SMALL_RUN = ("prompts.max_train=640", "prompts.max_heldout=80", "prompts.validation=24", "train.epochs=4")


def overrides_for(output_dir: Path, *more: str) -> tuple[str, ...]:
    return (f"output_dir={output_dir}", *SMALL_RUN, *more)
