"""How close the fused head comes to the matrix products it cannot do without.

    OMP_NUM_THREADS=1 python benchmarks/head_loss.py

Prints the time of forward and backward, that of plain torch.mm over the same rows (logits, gradient of the
states, gradient of the weight, and the teacher's logits once per token), and their ratio. On CPU it counts
processor time of one thread, which other jobs disturb little; on CUDA it also times the PyTorch form.
"""

import argparse
import time
from collections.abc import Callable

import torch
from stepbench.clock import seconds_of

from drafthead.losses import fused as losses
from drafthead.losses import objectives
from drafthead.losses.fused import HeadRows, Teacher, head_loss
from drafthead.losses.objectives import OBJECTIVES


def seconds(work: Callable, device: str) -> float:
    """Best of several runs, after one that warms up."""
    work()
    clock = time.perf_counter if device == "cuda" else time.process_time
    return min(seconds_of(work, device, clock) for _ in range(3))


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8192 if cuda else 512)
    parser.add_argument("--hidden", type=int, default=2880 if cuda else 512)
    parser.add_argument("--vocabulary", type=int, default=32000 if cuda else 16384)
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES if cuda else ["forward_kl"])
    args = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    K, T, H, D = args.steps, args.tokens, args.hidden, args.vocabulary

    states = torch.randn(K, T, H, device=device, dtype=dtype).requires_grad_()
    weight, teacher_weight = (torch.randn(D, H, device=device, dtype=dtype) / H**0.5 for _ in range(2))
    teacher = Teacher(torch.randn(T, H, device=device, dtype=dtype), teacher_weight, torch.full((T,), 12.0).to(device))
    met = torch.arange(1, T + 1, device=device) + torch.arange(K, device=device)[:, None]  # step k at t meets t + 1 + k
    rows = HeadRows(states.flatten(0, 1), torch.where(met < T, met, -1).flatten(), (T,) * K)
    scale = torch.full((K,), 1 / T, device=device)
    weight.requires_grad_()

    def fused(objective):
        return torch.autograd.grad(head_loss(rows, weight, teacher, scale, objective).loss, (states, weight))

    # One chunk's products, scaled up to all rows.
    chunk = min(losses.CHUNK_ROWS[device], 2048)
    x, g, w = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((chunk, H), (chunk, D), (D, H)))
    out, grad_states, grad_weight = torch.empty_like(g), torch.empty_like(x), torch.empty_like(w)
    per_row = [
        seconds(work, device) / chunk
        for work in (
            lambda: torch.mm(x, w.T, out=out),
            lambda: torch.mm(g, w, out=grad_states),
            lambda: torch.addmm(grad_weight, g.T, x, out=grad_weight),
        )
    ]
    products = sum(per_row) * int((met < T).sum()) + per_row[0] * T
    print(f"K={K} T={T} H={H} D={D} {dtype} {device}: products alone {products:.3f} s")
    for objective in args.objectives:
        ours = seconds(lambda: fused(objective), device)  # noqa: B023
        print(f"{objective:18} fused {ours:.3f} s, {products / ours:.0%} of the products' pace", end="")
        if cuda:
            tuned, losses._passes = losses._passes, lambda *_: objectives
            print(f"; PyTorch form {seconds(lambda: fused(objective), device):.3f} s", end="")  # noqa: B023
            losses._passes = tuned
        print()
    if cuda:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
