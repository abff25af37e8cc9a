"""The passes over logits as Triton kernels for CUDA, one program a row.

The same two functions as in `drafthead.losses.objectives`, for `ANALYTIC_OBJECTIVE`, forward KL. Importing this module
imports Triton; `drafthead.losses.fused` does so only for tensors on CUDA.

Symbols as in `drafthead.losses.objectives`; R draft rows, C teacher tokens, D draft vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafthead.losses.objectives import ANALYTIC_OBJECTIVE, RowLoss, TargetRows

# Elements of a row at a time, and warps of a program: 16 elements a thread, no register spilled. Fixed and not tuned by
# timing: another choice sums in another order, and ranks or a resumed run could differ. It gives up a few per cent.
BLOCK, WARPS = 4096, 8


@triton.jit
def target_kernel(logits, lse, mass, negentropy, size, BLOCK: tl.constexpr):
    # Normalises one row of the target's logits (C, D) float32 in place, to r; lse (C,) is over the target's full
    # vocabulary; out: mass (C, 1), negentropy (C,).
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
        tl.store(logits + start + lanes, r, mask=inside)
    tl.store(mass + row, tl.exp(draft_lse - tl.load(lse + row)))
    tl.store(negentropy + row, tl.sum(entropy_parts, 0))


@triton.jit
def score_kernel(
    logits,  # (R, D) float32
    grad,  # (R, D) any type, out; may be logits
    target_r,  # (C, D)
    target_negentropy,  # (C,)
    met,  # (R,) teacher token of each row
    scale,  # (R,)
    loss_out,  # (R,)
    best_out,  # (R,)
    size,  # D
    NEEDS_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The loss, gradient and prediction of one row, in two passes over it. The first finds the peak, the softmax's sum,
    # the argmax and the loss; the second writes the gradient, and finds the row in cache.
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(met + row).to(tl.int64)
    logits += row * size
    grad += row * size
    target_r += token * size
    lanes = tl.arange(0, BLOCK)

    # Softmax online: the sum so far is rescaled whenever the peak rises.
    peak = float("-inf")
    total = 0.0
    best = 0
    cross_parts = tl.zeros((BLOCK,), tl.float32)  # sum r z
    for start in range(0, size, BLOCK):
        inside = start + lanes < size
        z = tl.load(logits + start + lanes, mask=inside, other=float("-inf"))
        block_peak, block_best = tl.max(z, 0, return_indices=True)
        best = tl.where(block_peak > peak, start + block_best, best)
        higher = tl.maximum(peak, block_peak)
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(z - higher), 0)
        peak = higher
        r = tl.load(target_r + start + lanes, mask=inside, other=0.0)
        cross_parts += tl.where(inside, r * z, 0.0)
    log_total = tl.log(total)
    tl.store(best_out + row, best)

    tl.store(loss_out + row, tl.load(target_negentropy + token) - tl.sum(cross_parts, 0) + peak + log_total)

    if NEEDS_GRAD:
        row_scale = tl.load(scale + row)
        for start in range(0, size, BLOCK):
            inside = start + lanes < size
            z = tl.load(logits + start + lanes, mask=inside, other=float("-inf"))
            r = tl.load(target_r + start + lanes, mask=inside, other=0.0)
            q = tl.exp(z - peak - log_total)
            tl.store(grad + start + lanes, (q - r) * row_scale, mask=inside)


def prepare_target(objective: str, logits: Tensor, lse: Tensor, block: int = BLOCK) -> TargetRows:
    """As `drafthead.losses.objectives.prepare_target`, for contiguous float32."""
    assert objective == ANALYTIC_OBJECTIVE
    mass, negentropy = lse.new_empty(len(lse), 1), torch.empty_like(lse)
    target_kernel[(len(logits),)](logits, lse, mass, negentropy, logits.shape[1], BLOCK=block, num_warps=WARPS)
    return TargetRows(logits, mass, negentropy)


def score_rows(
    objective: str,
    logits: Tensor,
    target: TargetRows,
    met: Tensor,
    scale: Tensor,
    grad: Tensor | None,
    block: int = BLOCK,
) -> RowLoss:
    """As `drafthead.losses.objectives.score_rows`, for contiguous float32."""
    loss, best = torch.empty_like(scale), torch.empty_like(met)
    out = logits if grad is None else grad
    score_kernel[(len(logits),)](
        logits, out, target.values, target.negentropy, met, scale, loss, best, logits.shape[1],
        grad is not None, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return RowLoss(loss, best)
