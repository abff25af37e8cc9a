"""One optimiser step of a shipped recipe at true size on fake CUDA tensors; prints what it would take as JSON.

    python -m tests.gpu.fake_step configs/gpt-oss-120b.yaml [section.key=value ...]

`Trainer.step` itself runs: batch to the device, unroll, loss, backward, metrics. Stood in for: the thread that reads
ahead, DeepSpeed (gradients are checked for device and type instead), and the Triton kernels (counted by the bytes they
move).
"""

import json
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from tests.gpu.fake_cuda import Counter  # isort: skip - before torch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from drafthead.config import Recipe, load_recipe
from drafthead.data.packing import Window
from drafthead.drafters import kernels, recompute
from drafthead.drafters.base import draft_shape
from drafthead.drafters.batch import PackedBatch, tail_layout
from drafthead.drafters.registry import drafter_of
from drafthead.losses import fused
from drafthead.losses.objectives import RowLoss, TargetRows
from drafthead.target.pieces import FrozenTarget, recipe_spec
from drafthead.training.feed import Prefetch
from drafthead.training.trainer import LossModule, Trainer

DEVICE = torch.device("cuda:0")


class Kernels:
    """`drafthead.losses.kernels` with nothing but its contract: types, contiguity, and the bytes it moves."""

    def __init__(self, counter: Counter):
        self._counter = counter

    def prepare_target(self, objective: str, logits: Tensor, lse: Tensor) -> TargetRows:
        self._check(logits, lse)
        self._counter.kernel(3 * logits.nbytes)  # read twice, written once
        return TargetRows(logits, lse.new_empty(len(lse), 1), torch.empty_like(lse))

    def score_rows(self, objective, logits, target, met, scale, grad) -> RowLoss:
        self._check(logits, *target, scale)
        assert met.is_cuda
        assert met.dtype == torch.int64
        # Its first pass reads memory, the others the cache.
        self._counter.kernel(logits.nbytes + target.values.nbytes + (0 if grad is None else grad.nbytes))
        return RowLoss(torch.empty_like(scale), torch.empty_like(met))

    @staticmethod
    def _check(*tensors: Tensor) -> None:
        for tensor in tensors:
            assert tensor.is_cuda
            assert tensor.is_contiguous()
            assert tensor.dtype == torch.float32


class BlockKernels:
    """`drafthead.drafters.kernels` likewise: each reads what it is given and writes what it makes, once."""

    def __init__(self, counter: Counter):
        self._counter = counter

    def _pass(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            assert tensor.is_cuda
            assert tensor.is_contiguous()
        self._counter.kernel(sum(tensor.nbytes for tensor in tensors))

    def rms_norm(self, states: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, scale = torch.empty_like(states), states.new_empty(*states.shape[:-1], 1, dtype=torch.float32)
        self._pass(states, weight, out, scale)
        return out, scale

    def rms_norm_backward(self, grad, states, weight, scale, needs_states) -> tuple[Tensor | None, Tensor]:
        parts = states.new_empty(kernels._PROGRAMS, states.shape[-1], dtype=torch.float32)
        grad_states = [torch.empty_like(states)] if needs_states else []
        self._pass(grad.contiguous(), states, weight, scale, parts, *grad_states)
        return (grad_states or [None])[0], parts.sum(0).to(weight.dtype)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        self._pass(gate, up, out)
        return out

    def gated_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        grads = torch.empty_like(gate), torch.empty_like(up)
        self._pass(grad.contiguous(), gate, up, *grads)
        return grads

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
        out = torch.empty_like(states)
        assert cos.dtype == sin.dtype == torch.float32
        self._pass(states.contiguous(), cos, sin, out)
        return out

    def merge(self, query, pairs, block_out, block_lse, scale) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(block_out), torch.empty_like(block_lse)
        self._pass(query, *pairs, block_out, block_lse, out, lse)
        return out, lse

    def merge_backward(self, grad_out, query, pairs, out, lse, grad_query, scale) -> list[Tensor]:
        grads = [torch.empty_like(states) for states in pairs]
        self._pass(grad_out, query, *pairs, out, lse, grad_query, grad_query, *grads)
        return grads


class Accelerator(SimpleNamespace):
    """One rank, without an engine."""

    num_processes, process_index, device, is_main_process = 1, 0, DEVICE, True

    def accumulate(self, engine: Any) -> Any:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        return tensor


class Optimizer:
    """Checks what it would be given."""

    def __init__(self, parameters: list[Tensor]):
        self._parameters, self.param_groups = parameters, [{"initial_lr": 1.0}]

    def step(self) -> None:
        for parameter in self._parameters:
            assert parameter.grad is not None
            assert (parameter.grad.dtype, parameter.grad.device) == (parameter.dtype, DEVICE)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class InThisThread:
    """A pool of threads without threads: modes of dispatch belong to one."""

    def submit(self, work: Any, *args: Any) -> Future:
        done: Future = Future()
        done.set_result(work(*args))
        return done


def measure(recipe: Recipe, lengths: list[int], prompts: list[int]) -> dict[str, Any]:
    """Take one step over one micro batch of documents of these lengths, prompts included."""
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"batches_per_step": 1})})
    drafter, shape = drafter_of(recipe.head), draft_shape(recipe.head, recipe_spec(recipe), recipe.target.aux_layer_ids)
    masks = [torch.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)]
    firsts = [drafter.first_row(mask) for mask in masks]
    real = tail_layout(lengths, firsts)
    scored = torch.cat([drafter.loss_rows(m)[:, f:] for m, f in zip(masks, firsts, strict=True)], dim=1)
    K, R = scored.shape
    T, H, V, D = sum(lengths), shape.hidden_size, shape.vocab_size, shape.head.draft_vocab_size
    N, fp8 = shape.num_aux_layers, recipe.states.format == "fp8"
    counter = Counter([(n - f, n) for n, f in zip(lengths, firsts, strict=True)])

    # Chunks are cut by values: from the real masks.
    ahead = torch.stack([torch.roll(torch.arange(R), -1 - k) for k in range(K)])
    teacher, valid = torch.where(scored, ahead, -1).flatten(), tuple(scored.sum(1).tolist())
    chunks = fused.cut(teacher, K, "cuda")

    with FakeTensorMode() as mode:

        def host(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(size, dtype=dtype)

        def device(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(size, dtype=dtype, device=DEVICE)

        with torch.device("meta"):
            draft = drafter.MODULE(shape)
        draft.load_state_dict({name: device(*p.shape) for name, p in draft.state_dict().items()}, assign=True)
        for parameter in draft.parameters():
            parameter.requires_grad_()
        draft.recompute = recipe.train.gradient_checkpointing
        module = LossModule(draft, recipe.train.objective)
        module.get_global_grad_norm = lambda: 1.0  # type: ignore[assignment]
        long, yes = torch.int64, torch.bool
        layout = real.__class__(
            *(mode.from_tensor(t) for t in (real.cu_seqlens, real.rows, real.cu_rows)), real.longest, real.most_rows
        )
        batch = PackedBatch(
            layout=layout, input_ids=host(T, dtype=long), positions=host(T, dtype=long),
            aux=host(T, N * H, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16),
            loss_mask=host(R, dtype=yes), scored=host(K, R, dtype=yes),
            of_row=host(R, dtype=long), last_hidden=host(R, H), argmax=host(R, dtype=long),
            lse=host(R, dtype=torch.float32), aux_scale=host(T, N, dtype=torch.float32) if fp8 else None,
            chunks=fused.Chunks(*map(mode.from_tensor, chunks[:3]), *chunks[3:]),
        )  # fmt: skip
        fused._passes = lambda *_: Kernels(counter)
        recompute._kernels = lambda: BlockKernels(counter)
        trainer = object.__new__(Trainer)
        stream = [[Window(0, 0, T, 0, T, valid)]]
        prefetch = Prefetch(stream, lambda windows: batch, DEVICE)
        prefetch._pool = InThisThread()  # type: ignore[assignment]
        torch.Tensor.pin_memory = lambda self: self  # type: ignore[assignment, method-assign]  a build without CUDA
        vars(trainer).update(
            recipe=recipe, config=recipe.train, drafter=drafter, accelerator=Accelerator(), engine=module,
            device=torch.device(DEVICE), dtype=torch.bfloat16, total_steps=1,
            state=SimpleNamespace(acceptance_length=1.0, acceptance_per_position=(), prompts=0),
            optimizer=Optimizer(list(draft.parameters())), stream=stream, feed=SimpleNamespace(),
            prefetch=prefetch,
            target=FrozenTarget(device(V, H), device(H, dtype=torch.float32), device(D, H), shape.rms_norm_eps,
                                device(D, dtype=long)),
        )  # fmt: skip
        with counter:
            trainer.step(0)
    names = ("launches", "moved", "operations", "seconds", "peak", "waits", "sent")
    return {name: getattr(counter, name) for name in names}


if __name__ == "__main__":
    tokens, documents = 8192, 4
    lengths = [tokens // documents] * documents
    print(json.dumps(measure(load_recipe(sys.argv[1], sys.argv[2:]), lengths, [0] * documents)))
