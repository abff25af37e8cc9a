"""How far apart two computations of one thing may come out, whatever processor ran them: from the type, the length of
the sums and the number of optimiser steps alone. A bound that one machine gave is red on the next."""

import math
from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import Tensor


def rounding(dtype: torch.dtype, terms: int, steps: int = 0) -> float:
    """Relative distance of two sums of the same numbers, added up in different orders.

    Either is off by less than sqrt(terms) half units in the last place, because errors have either sign (Higham and
    Mary 2019, doi:10.1137/18M1226312).

    Args:
        dtype: type of the additions.
        terms: number of terms of the longest sum on the way to the result, times the number of such sums in a row.
        steps: optimiser steps before it; each begins where the one before it led to, and adds an error of its own.
    """
    return (1 + steps) * torch.finfo(dtype).eps * math.sqrt(terms)


def rounded(dtype: torch.dtype, terms: int, times: int = 1) -> float:
    """Relative error of what is added up in float32 and then rounded to a type.

    Args:
        dtype: type of the additions.
        terms: number of terms of the longest sum.
        times: roundings by a whole eps, which is what one towards zero does; one to the nearest number is half of it.
    """
    return times * torch.finfo(dtype).eps + rounding(torch.float32, terms)


def assert_same_losses(ours: Iterable[float], theirs: Iterable[float], terms: int) -> None:
    """Losses of the same float32 optimiser steps, from the first one on; `terms` as in `rounding`."""
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one == pytest.approx(other, rel=rounding(torch.float32, terms, step)), f"step {step + 1}"


def assert_same_norms(ours: Iterable[float], theirs: Iterable[float], terms: int, parameters: int) -> None:
    """Norms of the gradients of these steps; `parameters` squares are added up, and a root halves their error."""
    of_sum = rounding(torch.float32, parameters) / 2
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        rel = of_sum + rounding(torch.float32, terms, step)
        assert one == pytest.approx(other, rel=rel), f"step {step + 1}"


def assert_same_weights(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], terms: int, steps: int, rate: float
) -> None:
    """Weights after these steps of AdamW, as one vector.

    AdamW divides a gradient by its size. With a relative error of d, where gradients lie evenly about zero, the share d
    of them is smaller than its error and may have either sign: an update of twice the rate apart. The others are apart
    by their own relative error. Together that is sqrt(5 d) of the rate in the root mean square.
    """
    assert ours.keys() == theirs.keys()
    square = sum((theirs[name].double() - tensor.double()).square().sum() for name, tensor in ours.items())
    apart = sum(math.sqrt(5 * rounding(torch.float32, terms, step)) for step in range(steps))
    assert square**0.5 <= rate * apart * math.sqrt(sum(tensor.numel() for tensor in ours.values()))
