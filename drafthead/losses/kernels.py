"""The passes over logits as Triton kernels for CUDA, one program a row.

The same two functions as in `drafthead.losses.objectives`, for the objectives in `WRITTEN`. Importing this module
imports Triton; `drafthead.losses.fused` does so only for tensors on CUDA.

Symbols as in `drafthead.losses.objectives`; R draft rows, C teacher tokens, D draft vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafthead.losses.objectives import LK_RATE, RowLoss, TargetRows

WRITTEN = ("forward_kl", "total_variation", "lk_hybrid")
# Elements of a row at a time, warps: 8 to 32 elements per thread.
SHAPES = [(1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (32768, 32)]


@triton.jit
def target_kernel(
    logits,  # (C, D) float32, in: the target's logits; out: r
    lse,  # (C,) over the target's full vocabulary
    mass,  # (C, 1) out
    negentropy,  # (C,) out
    size,  # D
    BLOCK: tl.constexpr,
):
    # Normalises one row of the target's logits in place.
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
    target_mass,  # (C, 1)
    target_negentropy,  # (C,)
    met,  # (R,) teacher token of each row
    scale,  # (R,)
    loss_out,  # (R,)
    best_out,  # (R,)
    size,  # D
    OBJECTIVE: tl.constexpr,
    NEEDS_GRAD: tl.constexpr,
    LK_RATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The loss, gradient and prediction of one row, in up to three passes over it. The first finds the peak, the
    # softmax's sum and the argmax; the second the sums that a gradient needs beforehand (forward KL's does not); the
    # third writes the gradient. Only the first reads device memory, the others find the row in cache.
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(met + row).to(tl.int64)
    logits += row * size
    grad += row * size
    target_r += token * size
    mass = tl.load(target_mass + token)
    lanes = tl.arange(0, BLOCK)
    HAS_KL: tl.constexpr = OBJECTIVE != "total_variation"
    HAS_TV: tl.constexpr = OBJECTIVE != "forward_kl"

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
        if HAS_KL:
            r = tl.load(target_r + start + lanes, mask=inside, other=0.0)
            cross_parts += tl.where(inside, r * z, 0.0)
    log_total = tl.log(total)
    tl.store(best_out + row, best)

    # The sums over the row: of min(p, q), and of q where q < p.
    accepted_parts = tl.zeros((BLOCK,), tl.float32)
    gaining_parts = tl.zeros((BLOCK,), tl.float32)
    if HAS_TV:
        for start in range(0, size, BLOCK):
            inside = start + lanes < size
            z = tl.load(logits + start + lanes, mask=inside, other=float("-inf"))
            r = tl.load(target_r + start + lanes, mask=inside, other=0.0)
            q = tl.exp(z - peak - log_total)
            accepted_parts += tl.minimum(mass * r, q)
            gaining_parts += tl.where(q < mass * r, q, 0.0)
    accepted = tl.sum(accepted_parts, 0)
    gaining = tl.sum(gaining_parts, 0)
    loss = 1 - accepted
    weight = 0.0
    if HAS_KL:
        forward = tl.load(target_negentropy + token) - tl.sum(cross_parts, 0) + peak + log_total
        loss = forward
        if HAS_TV:
            weight = tl.exp(-LK_RATE * accepted)
            loss = weight * forward + (1 - weight) * (1 - accepted)
    tl.store(loss_out + row, loss)

    if NEEDS_GRAD:
        row_scale = tl.load(scale + row)
        for start in range(0, size, BLOCK):
            inside = start + lanes < size
            z = tl.load(logits + start + lanes, mask=inside, other=float("-inf"))
            r = tl.load(target_r + start + lanes, mask=inside, other=0.0)
            q = tl.exp(z - peak - log_total)
            slope = q - r
            if HAS_TV:
                slope = weight * slope + (1 - weight) * q * (gaining - tl.where(q < mass * r, 1.0, 0.0))
            tl.store(grad + start + lanes, slope * row_scale, mask=inside)


def _tuned(kernel: Any, key: list[str], overwritten: str) -> Any:
    """The fastest of `SHAPES` for each value of the arguments in `key` and types of tensors.

    Measured at the first launch, with the argument that is overwritten restored between trials. The choice is kept
    in Triton's cache on disk: another one would sum in another order, and a resumed run would not repeat the
    interrupted one bit for bit.
    """
    return triton.autotune(
        configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in SHAPES],
        key=key,
        restore_value=[overwritten],
        cache_results=True,
    )(kernel)


tuned_target_kernel = _tuned(target_kernel, key=["size"], overwritten="logits")
tuned_score_kernel = _tuned(score_kernel, key=["size", "OBJECTIVE", "NEEDS_GRAD"], overwritten="grad")


def _launch(kernel: Any, tuned: Any, block: int | None, logits: Tensor, *arguments: Any) -> None:
    if block is None:
        tuned[(len(logits),)](logits, *arguments)
    else:
        kernel[(len(logits),)](logits, *arguments, BLOCK=block)


def prepare_target(objective: str, logits: Tensor, lse: Tensor, block: int | None = None) -> TargetRows:
    """As `drafthead.losses.objectives.prepare_target`, for contiguous float32; `block` fixes the tuned block size."""
    mass, negentropy = lse.new_empty(len(lse), 1), torch.empty_like(lse)
    arguments = (logits, lse, mass, negentropy, logits.shape[1])
    _launch(target_kernel, tuned_target_kernel, block, *arguments)
    return TargetRows(logits, mass, negentropy)


def score_rows(
    objective: str,
    logits: Tensor,
    target: TargetRows,
    met: Tensor,
    scale: Tensor,
    grad: Tensor | None,
    block: int | None = None,
) -> RowLoss:
    """As `drafthead.losses.objectives.score_rows`, for contiguous float32; `block` fixes the tuned block size."""
    loss, best = torch.empty_like(scale), torch.empty_like(met)
    out = logits if grad is None else grad
    arguments = (logits, out, *target, met, scale, loss, best, logits.shape[1])
    constants = (objective, grad is not None, LK_RATE)
    _launch(score_kernel, tuned_score_kernel, block, *arguments, *constants)
    return RowLoss(loss, best)
