"""The target's side of a chunk: one program normalises one row of its logits, in place.

Symbols as in `drafthead.losses.objectives`; C teacher tokens, D draft vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafthead.losses.kernels.tuning import tuned
from drafthead.losses.objectives import ObjectiveName, Target


@triton.jit
def target_kernel(
    logits,  # (C, D) float32, in: the target's logits; out: r, or log r for reverse_kl
    lse,  # (C,) over the target's full vocabulary
    mass,  # (C, 1) out
    negentropy,  # (C,) out
    size,  # D
    OBJECTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    lanes = tl.arange(0, BLOCK)

    # Softmax online: the sum so far is rescaled whenever the peak rises.
    peak = float("-inf")
    total = 0.0
    for start in range(0, size, BLOCK):
        z = tl.load(logits + start + lanes, mask=start + lanes < size, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(z, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(z - higher), 0)
        peak = higher
    draft_lse = peak + tl.log(total)

    entropy_parts = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + lanes < size
        log_r = tl.load(logits + start + lanes, mask=inside, other=0.0) - draft_lse
        r = tl.exp(log_r)
        entropy_parts += tl.where(inside, r * log_r, 0.0)
        tl.store(logits + start + lanes, log_r if OBJECTIVE == "reverse_kl" else r, mask=inside)
    tl.store(mass + row, tl.exp(draft_lse - tl.load(lse + row)))
    tl.store(negentropy + row, tl.sum(entropy_parts, 0))


tuned_target_kernel = tuned(target_kernel, key=["size", "OBJECTIVE"], overwritten="logits")


def prepare_target(objective: ObjectiveName, logits: Tensor, lse: Tensor, block: int | None = None) -> Target:
    """As `drafthead.losses.rows.prepare_target`, for contiguous float32; `block` fixes the tuned block size."""
    mass, negentropy = lse.new_empty(len(lse), 1), torch.empty_like(lse)
    arguments = (logits, lse, mass, negentropy, logits.shape[1], objective)
    if block is None:
        tuned_target_kernel[(len(logits),)](*arguments)
    else:
        target_kernel[(len(logits),)](*arguments, BLOCK=block)
    return Target(logits, mass, negentropy)
