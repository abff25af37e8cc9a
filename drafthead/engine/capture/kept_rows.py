"""Rows of answers that an engine is still giving, or whose fate is not decided yet.

While an engine generates, nobody knows how long an answer gets, whether the recipe will drop it, or which place in
which shard it will have. Its rows therefore stay in host memory, step by step as they were computed, until the caller
says what becomes of them. The last token of an answer is never fed to the target, so it has no row. Nothing reads that
row: step k of the unroll predicts token t + 2 + k from features at t, and teachers reach up to the last token but one
(drafters.eagle3.alignment); zeros take its place.

Shapes: T tokens, C captured boundaries, H hidden.
"""

import torch
from torch import Tensor


class KeptRows:
    """Rows by the name of their text."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}

    def add(self, name: str, start: int, rows: Tensor) -> None:
        """Take over rows (n, C, H) of the tokens from `start` on; 0 begins a text anew."""
        if start == 0:
            self._rows[name] = []
        self._rows[name].append(rows)

    def take(self, name: str, num_tokens: int) -> Tensor:
        """(T, C, H): the rows of a text of that many tokens, the last one zero; they are kept no longer.

        Raises:
            ValueError: other rows were captured than the text's.
        """
        rows = self._rows.pop(name, [])
        found = sum(len(part) for part in rows)
        if found not in (num_tokens - 1, num_tokens) or not rows:
            raise ValueError(
                f"{name}: states of {found} tokens were captured while a text of {num_tokens} was generated; this vLLM "
                "computes or orders steps differently, set states.one_pass=false"
            )
        if found < num_tokens:
            rows.append(torch.zeros_like(rows[-1][:1]))
        return torch.cat(rows)

    def clear(self) -> None:
        """Forget what nobody took."""
        self._rows.clear()
