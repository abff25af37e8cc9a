"""How small the chain is when it is run for the tests."""

from pathlib import Path

# Enough for a head that clearly beats its controls, small enough for a test: small batches make many steps of it.
SMALL_RUN = (
    "prompts.max_train=160", "prompts.max_heldout=60", "prompts.validation=24", "train.epochs=3",
    "train.tokens_per_batch=2048",
)  # fmt: skip


def overrides_for(output_dir: Path, *more: str) -> tuple[str, ...]:
    return (f"output_dir={output_dir}", *SMALL_RUN, *more)
