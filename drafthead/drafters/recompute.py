"""Activation recomputation: what the backward computes again from tensors that are kept anyway.

A matrix product keeps its input for the gradient of its weight. In a Llama block that input is mostly the result of
something cheap: a norm, a gated activation. Over K unrolled steps those are about half of all memory. The functions
here keep only their own inputs, and under `recomputing()` autograd keeps a reference to the operation instead of its
result:

    kept by autograd per row      norm out, norm inner, gate, silu(gate), silu(gate) * up, up, ...
    kept under recomputing()      norm in, 1 / rms, gate, up

No matrix product is done twice, which is what checkpointing whole blocks would cost (a third more time). A result is
computed at most once in the backward, and dropped when its own gradient has been formed. What passes through something
else on its way (a view, a hook of ZeRO-3) is kept as before.

Freed memory goes back to the system (`trim_heap`): torch allocates CPU tensors aligned to 64 bytes, and glibc before
2.38 cannot place such a request into a hole of exactly its size. The holes that temporaries of the unrolled steps leave
would stay with the process: half a gigabyte at 2,048 tokens and 7 steps.

Shapes: R rows, H features.
"""

import ctypes
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
_WORTH_IT = 4 * 2**20  # bytes; the holes that smaller states leave are not worth fetching pages again


def recomputing() -> AbstractContextManager:
    """Inside, results of this module's functions are computed again in the backward instead of being kept."""
    return torch.autograd.graph.saved_tensors_hooks(_note, _read)


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """states / rms(states) * weight over the last dimension, in float32 or wider."""
    return _RMSNorm.apply(states, weight, eps)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _Gated.apply(gate, up)


def _note(tensor: Tensor) -> Any:
    """The autograd node that can compute the tensor again, or the tensor."""
    return tensor.grad_fn if hasattr(tensor.grad_fn, "recompute") else tensor.detach()


def _read(note: Any) -> Tensor:
    if isinstance(note, Tensor):
        return note
    if note.made is None:
        note.made = note.recompute(note)
    return note.made


def kernels_for(states: Tensor) -> ModuleType | None:
    """`drafters.kernels` where they serve these states: half precision on CUDA; else None."""
    if not (states.is_cuda and states.dtype in (torch.bfloat16, torch.float16)):
        return None
    from drafthead.drafters import kernels  # imports Triton, which torch brings along where it has CUDA

    return kernels


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, eps):
        ctx.eps, kernels = eps, kernels_for(states)
        if kernels:
            normed, scale = kernels.rms_norm(states, weight, eps)
        else:
            wide = states.to(torch.promote_types(states.dtype, torch.float32))
            size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            scale = torch.rsqrt(size.square() / wide.shape[-1] + eps)  # (R, 1)
            normed = (wide * scale).mul_(weight).to(states.dtype)
        # A copy of the weight: under ZeRO-3 the parameter is empty whenever its own module does not run.
        ctx.save_for_backward(states, weight.detach().clone(), scale)
        # A plain function, not a method of ctx: a cycle would keep every step's tensors until garbage collection.
        ctx.recompute, ctx.made = _normed, None
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.made = None
        states, weight, scale = ctx.saved_tensors
        if kernels := kernels_for(states):
            return *kernels.rms_norm_backward(grad, states, weight, scale, ctx.needs_input_grad[0]), None
        unit = states * scale  # (R, H), float32 or wider
        along = grad * unit
        grad_weight = along.flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        # Not along @ weight: what MKL returns of a matrix and a vector depends on where they lie in memory.
        mean = (along * weight).mean(-1, keepdim=True)  # of inner * unit
        inner = grad * weight
        grad_states = inner.addcmul_(unit, mean, value=-1).mul_(scale)
        return grad_states.to(states.dtype), grad_weight, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        ctx.recompute, ctx.made = lambda node: _gated(*node.saved_tensors), None
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.made = None
        gate, up = ctx.saved_tensors
        if kernels := kernels_for(gate):
            return kernels.gated_backward(grad, gate, up)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, torch.nn.functional.silu(gate).mul_(grad)


def _normed(node: Any) -> Tensor:
    states, weight, scale = node.saved_tensors
    if kernels := kernels_for(states):
        return kernels.rms_norm(states, weight, node.eps)[0]
    return (states * scale).mul_(weight).to(states.dtype)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    if kernels := kernels_for(gate):
        return kernels.gated(gate, up)
    return torch.nn.functional.silu(gate).mul_(up)


def trim_heap(state: Tensor) -> None:
    """Return freed heap to the operating system (malloc_trim), after states of this size were computed.

    Does nothing for small states, on a GPU, or without glibc.
    """
    if state.device.type == "cpu" and _trim is not None and state.nbytes >= _WORTH_IT:
        _trim(0)
