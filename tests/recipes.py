"""The embedded recipe, written elsewhere and made smaller."""

from pathlib import Path

from drafthead.config import Recipe, load_recipe

# A head of a few thousand weights, for what does not depend on how good it is.
SMALL_HEAD = (
    "head.draft_vocab_size=256", "head.intermediate_size=64", "head.num_attention_heads=2",
    "head.num_key_value_heads=1", "head.head_dim=32",
)  # fmt: skip


def tiny_recipe(output_dir: Path | str, *overrides: str) -> Recipe:
    """configs/tiny.yaml with everything it writes below `output_dir`."""
    return load_recipe(overrides=[f"output_dir={output_dir}", *overrides])
