"""Norm, SwiGLU, rotation and the merge of unrolled steps as Triton kernels, for half precision on CUDA.

In PyTorch each is a chain of launches that read and write the same rows again; here each is one pass, computed in
float32 and rounded once. The formulas stand beside their PyTorch form: `recompute` (norm, SwiGLU), `layers` (rotation),
`attention` (merge). Importing this module imports Triton. Sums are taken in a fixed order, so a run repeats.

Shapes: R rows, H features, Q query and G key/value heads, P = Q / G, D head dimension.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 512  # of the norm's backward: each sums the weight's gradient over its share of the rows
_BLOCK = 2048  # elements of a program of SwiGLU


@triton.jit
def norm_kernel(states, weight, out, scale, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < size
    x = tl.load(states + row * size + lanes, mask=inside, other=0.0).to(tl.float32)
    s = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    w = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + lanes, x * s * w, mask=inside)
    tl.store(scale + row, s)


@triton.jit
def norm_backward_kernel(
    grad, states, weight, scale, grad_states, grad_weight, rows, size, NEEDS_STATES: tl.constexpr, BLOCK: tl.constexpr
):
    # grad, states (R, H), weight (H,), scale (R,); out: grad_states (R, H) and grad_weight (programs, H) float32, parts
    # of the sum.
    lanes = tl.arange(0, BLOCK)
    inside = lanes < size
    w = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * size + lanes
    place = first
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        s = tl.load(scale + row)
        unit = tl.load(states + place, mask=inside, other=0.0).to(tl.float32) * s
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        total += g * unit
        if NEEDS_STATES:
            inner = g * w
            mean = tl.sum(inner * unit, 0) / size
            tl.store(grad_states + place, (inner - unit * mean) * s, mask=inside)
        place += tl.num_programs(0) * size
    tl.store(grad_weight + first, total, mask=inside)


@triton.jit
def gated_kernel(gate, up, out, size, BLOCK: tl.constexpr):
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < size
    z = tl.load(gate + lanes, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + lanes, z * tl.sigmoid(z) * u, mask=inside)


@triton.jit
def gated_backward_kernel(grad, gate, up, grad_gate, grad_up, size, BLOCK: tl.constexpr):
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < size
    g = tl.load(grad + lanes, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + lanes, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + lanes, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(z)
    tl.store(grad_gate + lanes, g * u * share * (1 + z * (1 - share)), mask=inside)
    tl.store(grad_up + lanes, g * z * share, mask=inside)


@triton.jit
def rotate_kernel(states, cos, sin, out, heads, half, BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    # states, out (R, heads, D); cos, sin (R, D) float32, both halves (D / 2) equal. BACK: by the negative angle, the
    # transpose, and so the gradient.
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None]
    inside = (head < heads) & (lane < half)
    c = tl.load(cos + row * 2 * half + lane, mask=lane < half, other=0.0)
    s = tl.load(sin + row * 2 * half + lane, mask=lane < half, other=0.0)
    if BACK:
        s = -s
    place = (row * heads + head) * 2 * half + lane
    first = tl.load(states + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(states + place + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, first * c - second * s, mask=inside)
    tl.store(out + place + half, second * c + first * s, mask=inside)


@triton.jit
def merge_kernel(
    query,  # (R, Q, D)
    keys,  # each (R, G, D)
    values,
    block_out,  # (R, Q, D)
    block_lse,  # (Q, R) float32
    out,  # (R, Q, D)
    lse,  # (Q, R) float32
    rows,
    groups,
    per_group,
    dim,
    scale,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
):
    # One row and one group of query heads: its softmax over the text, and an entry of each pair, online.
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    head, lane = tl.arange(0, PER_GROUP), tl.arange(0, DIM)
    has_head, has_lane = head < per_group, lane < dim
    inside = has_head[:, None] & has_lane[None]
    place = ((row * groups + group) * per_group + head)[:, None] * dim + lane[None]
    pair = (row * groups + group) * dim + lane
    of_head = (group * per_group + head).to(tl.int64) * rows + row
    q = tl.load(query + place, mask=inside, other=0.0).to(tl.float32) * scale
    mixed = tl.load(block_out + place, mask=inside, other=0.0).to(tl.float32)
    peak = tl.load(block_lse + of_head, mask=has_head, other=0.0)
    total = tl.full((PER_GROUP,), 1.0, tl.float32)
    for j in tl.static_range(len(keys)):
        k = tl.load(keys[j] + pair, mask=has_lane, other=0.0).to(tl.float32)
        v = tl.load(values[j] + pair, mask=has_lane, other=0.0).to(tl.float32)
        score = tl.sum(q * k[None], 1)
        higher = tl.maximum(peak, score)
        decay, added = tl.exp(peak - higher), tl.exp(score - higher)
        mixed = mixed * decay[:, None] + added[:, None] * v[None]
        total = total * decay + added
        peak = higher
    tl.store(out + place, mixed / total[:, None], mask=inside)
    tl.store(lse + of_head, peak + tl.log(total), mask=has_head)


@triton.jit
def merge_backward_kernel(
    grad_out,  # (R, Q, D)
    query,
    out,
    lse,  # (Q, R) float32
    keys,  # each (R, G, D)
    values,
    grad_query,  # (R, Q, D), in: of the text; out: of everything
    grad_keys,  # each (R, G, D) out
    grad_values,
    rows,
    groups,
    per_group,
    dim,
    scale,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
):
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    head, lane = tl.arange(0, PER_GROUP), tl.arange(0, DIM)
    has_head, has_lane = head < per_group, lane < dim
    inside = has_head[:, None] & has_lane[None]
    place = ((row * groups + group) * per_group + head)[:, None] * dim + lane[None]
    pair = (row * groups + group) * dim + lane
    q = tl.load(query + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_out + place, mask=inside, other=0.0).to(tl.float32)
    normaliser = tl.load(lse + (group * per_group + head).to(tl.int64) * rows + row, mask=has_head, other=0.0)
    term = tl.sum(g * tl.load(out + place, mask=inside, other=0.0).to(tl.float32), 1)
    total = tl.load(grad_query + place, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(len(keys)):
        k = tl.load(keys[j] + pair, mask=has_lane, other=0.0).to(tl.float32)
        v = tl.load(values[j] + pair, mask=has_lane, other=0.0).to(tl.float32)
        probability = tl.exp(tl.sum(q * k[None], 1) * scale - normaliser)
        grad_score = probability * (tl.sum(g * v[None], 1) - term) * scale
        total += grad_score[:, None] * k[None]
        # Rows of q and g beyond the group's heads are zero.
        tl.store(grad_keys[j] + pair, tl.sum(grad_score[:, None] * q, 0), mask=has_lane)
        tl.store(grad_values[j] + pair, tl.sum(probability[:, None] * g, 0), mask=has_lane)
    tl.store(grad_query + place, total, mask=inside)


def launch_shape(size: int) -> dict[str, int]:
    """Lanes for a whole row, and warps: 8 to 32 elements a thread, so that no register is spilled."""
    lanes = triton.next_power_of_2(size)
    return {"BLOCK": lanes, "num_warps": min(max(lanes // 256, 1), 16)}


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed states (..., H) and 1 / rms (..., 1) in float32."""
    states = states.contiguous()
    out, scale = torch.empty_like(states), states.new_empty(*states.shape[:-1], 1, dtype=torch.float32)
    size = states.shape[-1]
    norm_kernel[(scale.numel(),)](states, weight, out, scale, size, eps, **launch_shape(size))
    return out, scale


def rms_norm_backward(
    grad: Tensor, states: Tensor, weight: Tensor, scale: Tensor, needs_states: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradients of the states, where they are wanted, and of the weight (H,)."""
    grad, states, size = grad.contiguous(), states.contiguous(), states.shape[-1]
    programs = min(_PROGRAMS, scale.numel())
    grad_states = torch.empty_like(states) if needs_states else None
    parts = states.new_empty(programs, size, dtype=torch.float32)
    norm_backward_kernel[(programs,)](
        grad, states, weight, scale, parts if grad_states is None else grad_states, parts, scale.numel(), size,
        needs_states, **launch_shape(size),
    )  # fmt: skip
    return grad_states, parts.sum(0).to(weight.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    out = torch.empty_like(gate)
    gated_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), BLOCK=_BLOCK)
    return out


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), _BLOCK),)
    gated_backward_kernel[grid](grad.contiguous(), gate, up, grad_gate, grad_up, gate.numel(), BLOCK=_BLOCK)
    return grad_gate, grad_up


def rotate(states: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """Rotated states (R, heads, D) by the angles of cos and sin (R, 1, D), or back by them."""
    states = states.contiguous()
    rows, heads, dim = states.shape
    out = torch.empty_like(states)
    lanes = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(dim // 2)}
    rotate_kernel[(rows,)](states, cos.contiguous(), sin.contiguous(), out, heads, dim // 2, back, **lanes)
    return out


def merge(
    query: Tensor, pairs: Sequence[Tensor], block_out: Tensor, block_lse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The softmax over the text, output (R, Q, D) and log-sum-exp (Q, R), with one more entry for each pair.

    Args:
        query: (R, Q, D) queries.
        pairs: key and value of each draft position that is seen, each (R, G, D).
        block_out, block_lse: attention output and log-sum-exp over the text.
        scale: factor of the scores.
    """
    out, lse = torch.empty_like(block_out), torch.empty_like(block_lse)
    grid, shape = _merge_shape(query, pairs[0], scale)
    merge_kernel[grid](query, tuple(pairs[0::2]), tuple(pairs[1::2]), block_out, block_lse, out, lse, **shape)
    return out, lse


def merge_backward(
    grad_out: Tensor, query: Tensor, pairs: Sequence[Tensor], out: Tensor, lse: Tensor, grad_query: Tensor, scale: float
) -> list[Tensor]:
    """Gradients of the pairs; that of the query, given for the text, is completed in place."""
    grads = [torch.empty_like(states) for states in pairs]
    grid, shape = _merge_shape(query, pairs[0], scale)
    merge_backward_kernel[grid](
        grad_out, query, out, lse, tuple(pairs[0::2]), tuple(pairs[1::2]), grad_query, tuple(grads[0::2]),
        tuple(grads[1::2]), **shape,
    )  # fmt: skip
    return grads


def _merge_shape(query: Tensor, key: Tensor, scale: float) -> tuple[tuple[int], dict]:
    (rows, heads, dim), groups = query.shape, key.shape[1]
    per_group = heads // groups
    lanes = {"PER_GROUP": triton.next_power_of_2(per_group), "DIM": triton.next_power_of_2(dim)}
    sizes = {"rows": rows, "groups": groups, "per_group": per_group, "dim": dim, "scale": scale}
    return (rows * groups,), {**sizes, **lanes, "num_warps": max(1, lanes["PER_GROUP"] * lanes["DIM"] // 512)}
