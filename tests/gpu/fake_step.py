"""One optimiser step of a shipped recipe at true size on fake CUDA tensors; prints what it would take as JSON, then the
same with the overrides, if any are given.

    python -m tests.gpu.fake_step configs/gpt-oss-120b.yaml [section.key=value ...]

`Trainer.step` itself runs: batch to the device, unroll, loss, backward, metrics. Stood in for: the thread that reads
ahead, DeepSpeed (gradients are checked for device and type instead), and the launch of Triton kernels (counted by the
bytes they move).
"""

import json
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.gpu.fake_cuda import Counter  # isort: skip - before torch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from drafthead.config import Recipe, load_recipe
from drafthead.data.packing import Window
from drafthead.drafters import kernels as block_kernels
from drafthead.drafters.base import draft_shape
from drafthead.drafters.batch import PackedBatch, tail_layout
from drafthead.drafters.registry import drafter_of
from drafthead.losses import fused
from drafthead.losses import kernels as loss_kernels
from drafthead.target.pieces import FrozenTarget
from drafthead.target.spec import recipe_spec
from drafthead.training.feed import Prefetch
from drafthead.training.trainer import LossModule, Trainer

DEVICE = torch.device("cuda:0")


# Parameters of kernels that are computed with as they are; whatever else is loaded becomes float32.
TYPES = {"met": torch.int64} | dict.fromkeys(
    ("logits", "target_r", "target_mass", "target_negentropy", "lse", "mass", "negentropy", "loss_out", "scale",
     "cos", "sin", "block_lse"), torch.float32,
)  # fmt: skip


class Launch:
    """A Triton kernel with nothing but its contract: where its tensors lie, their types, and the bytes it moves.

    `passes`: how often each tensor is read or written.
    """

    def __init__(self, counter: Counter, kernel: Any, passes: int):
        self._counter, self.arg_names, self._passes = counter, kernel.arg_names, passes

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self._launch

    def _launch(self, *args: Any, **sizes: Any) -> None:
        moved = 0
        for name, value in zip(self.arg_names, args, strict=False):
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    assert tensor.is_cuda
                    assert tensor.is_contiguous()
                    assert tensor.dtype == TYPES.get(name, tensor.dtype), name
                    moved += tensor.nbytes
        self._counter.kernel(self._passes * moved)


# One rank, without an engine.
ACCELERATOR = SimpleNamespace(
    num_processes=1, process_index=0, device=DEVICE, is_main_process=True, accumulate=lambda engine: nullcontext(),
    backward=lambda loss: loss.backward(), reduce=lambda tensor, how: tensor,
)  # fmt: skip


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
    chunks = fused.chunk_rows(teacher, K, "cuda")

    with FakeTensorMode() as mode:
        host = partial(torch.empty, dtype=torch.bfloat16)
        device = partial(host, device=DEVICE)
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
        for kernels in (loss_kernels, block_kernels):
            for name in [name for name in vars(kernels) if name.endswith("_kernel")]:
                passes = 3 if name == "target_kernel" else 1  # it reads the logits twice and writes them once
                setattr(kernels, name, Launch(counter, getattr(kernels, name), passes))
        trainer = object.__new__(Trainer)
        stream = [[Window(0, 0, T, 0, T, valid)]]
        prefetch = Prefetch(stream, lambda windows: batch, DEVICE)
        prefetch._pool = InThisThread()  # type: ignore[assignment]
        pinned: list[Tensor] = []
        torch.Tensor.pin_memory = lambda self: pinned.append(self) or self  # type: ignore  # a build without CUDA
        vars(trainer).update(
            recipe=recipe, config=recipe.train, drafter=drafter, accelerator=ACCELERATOR, engine=module,
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
    return {"pinned": len(pinned), **{name: getattr(counter, name) for name in names}}


def waits_of_captured_rows() -> dict[str, int]:
    """Where the host waits for the captured rows of two requests on their way to it."""
    from drafthead.engine.connector import HiddenStatesConnector  # vLLM, which training does not import
    from drafthead.engine.shard_writer import to_host

    empty = torch.empty  # a build without CUDA pins nothing
    torch.empty = lambda *size, pin_memory=False, **more: empty(*size, **more)
    request = SimpleNamespace(start=0, stop=2000, block_ids=list(range(125)))
    with FakeTensorMode(allow_non_fake_inputs=True), Counter([]) as counter:
        cache = empty(200, 4, 16, 2880, dtype=torch.bfloat16, device=DEVICE)
        counter.waits.clear()
        rows = HiddenStatesConnector._copy(SimpleNamespace(_block_size=16), cache, [request, request])
        assert rows.shape == (4000, 4, 2880)
        to_host(rows)
    return counter.waits


if __name__ == "__main__":
    tokens, documents = 8192, 4
    lengths = [tokens // documents] * documents
    for overrides in ([], sys.argv[2:]):
        print(json.dumps(measure(load_recipe(sys.argv[1], overrides), lengths, [0] * documents)))
    print(json.dumps(waits_of_captured_rows()))
