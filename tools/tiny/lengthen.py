"""Train a target to answer behind long code as it answered without.

The loss is the Kullback-Leibler divergence from the target that it was, which reads the question alone, on the tokens
of the answer. The code runs once, without gradient; several questions follow it from its keys and values.

Gives up: gradients of the code's own states, which would take several times the seconds and memory.
Alternative: more training on long text, as large targets get; two CPU cores would need days.
"""

import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from tools.tiny.batches import encode_sample
from tools.tiny.samples import EFFORTS, Sample

PLAN = (1, 4, 0, 2, 16, 4, 0, 8)  # thousands (1,024) of tokens of a prompt with its code, a step each; 0: no code
QUESTIONS, AT_ONCE = 8, 2  # behind the same code; of them in memory together
LEARNING_RATE, WARMUP_STEPS, CLIP = 1e-3, 10, 1.0
DENSE_QUERIES = 1024  # more are computed in blocks, where they are the first


def lengthen(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    samples: list[Sample],
    code: Callable[[int, list[str]], str],
    steps: int,
) -> None:
    """Train `student` in place for `steps` steps of `QUESTIONS` samples behind the same code, or behind none.

    Args:
        student, teacher: fp32, of the gpt-oss architecture, loaded with `attn_implementation="blocks"`.
        tokenizer: tokenizer of both models, with the chat template.
        samples: questions and answers.
        code: text to stand before each of some questions, given the tokens of the longest such prompt.
        steps: number of optimiser steps.
    """
    choose = random.Random(0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.97), weight_decay=0.01)
    for step in range(steps):
        length, started = PLAN[step % len(PLAN)], time.monotonic()
        rate = min(1, (step + 1) / WARMUP_STEPS) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        chosen = choose.sample(samples, QUESTIONS)
        total, tokens = 0.0, 0
        before = code(1024 * length, [sample.prompt for sample in chosen]) if length else ""
        for loss, count in divergences(student, teacher, tokenizer, chosen, before, choose.choice(EFFORTS)):
            (loss / 1000).backward()
            total, tokens = total + loss.item(), tokens + count
        torch.nn.utils.clip_grad_norm_(student.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - started
        print(f"step {step + 1}/{steps}  {length:2}k  divergence {total / tokens:.3f}  {seconds:.0f} s", flush=True)


def divergences(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    samples: list[Sample],
    code: str,
    effort: str,
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the summed divergence over the answers' tokens of `AT_ONCE` samples behind `code`, and their count."""
    short = [encode_sample(sample, effort, tokenizer) for sample in samples]
    long = [encode_sample(replace(sample, prompt=code + sample.prompt), effort, tokenizer).ids for sample in samples]
    shared = next(i for i, column in enumerate(zip(*long, strict=False)) if len(set(column)) > 1)
    before = DynamicCache(config=student.config)
    with torch.no_grad():
        student.model(input_ids=torch.tensor([long[0][:shared]]), past_key_values=before, use_cache=True)
    for start in range(0, len(samples), AT_ONCE):
        group = range(start, min(start + AT_ONCE, len(samples)))
        cache = copy.deepcopy(before)
        cache.batch_repeat_interleave(len(group))
        with torch.no_grad():
            teacher_logits = teacher(input_ids=_padded([short[i].ids for i in group]), use_cache=False).logits
        student_logits = student(
            input_ids=_padded([long[i][shared:] for i in group]), past_key_values=cache, use_cache=True
        ).logits
        loss, count = student_logits.new_zeros(()), 0
        for row, i in enumerate(group):
            size = len(short[i].ids) - short[i].prompt_length
            rows = [end - 1 - size for end in (len(short[i].ids), len(long[i]) - shared)]
            teaching, learning = (
                logits[row, first : first + size].log_softmax(-1)
                for logits, first in zip((teacher_logits, student_logits), rows, strict=True)
            )
            loss = loss + functional.kl_div(learning, teaching, reduction="sum", log_target=True)
            count += size
        yield loss, count


def blocks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention of gpt-oss with sinks, without a matrix of all positions where there are many.

    As transformers' `eager`, which holds one and takes many times as long at 16,000 positions. Rows are padded on the
    right at most.
    """
    window, sinks = getattr(module, "sliding_window", None), module.sinks
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    many, length = query.shape[2], key.shape[2]
    if many <= DENSE_QUERIES or many < length or query.requires_grad:  # blocks have no gradient of the sinks' share
        out = _dense(query, key, value, scaling, sinks, _seen(many, length, window))
    elif window:  # every block of a window's size sees itself and the one before it
        rest = -many % window
        query, key, value = (functional.pad(t, (0, 0, 0, rest)).unflatten(2, (-1, window)) for t in (query, key, value))
        key, value = (torch.cat([functional.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1], t], 3) for t in (key, value))
        seen = _seen(window, 2 * window, window).repeat(query.shape[2], 1, 1)
        seen[0, :, :window] = False
        out = _dense(query, key, value, scaling, sinks[:, None], seen).flatten(2, 3)[:, :, :many]
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, summed = flash(query.contiguous(), key.contiguous(), value.contiguous(), 0.0, True, scale=scaling)
        out = out * torch.sigmoid(summed - sinks[:, None])[..., None]
    return out.transpose(1, 2).contiguous(), None


def _seen(queries: int, keys: int, window: int | None) -> torch.Tensor:
    """Which of `keys` positions each of the last `queries` sees."""
    at, position = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    return (position <= at) & (position > at - window) if window else position <= at


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, sinks: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~seen, -math.inf)
    sink = sinks[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ value


def _padded(rows: list[list[int]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


AttentionInterface.register("blocks", blocks)
