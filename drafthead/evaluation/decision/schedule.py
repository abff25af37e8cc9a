"""The draft length by batch size, as vLLM takes it: `num_speculative_tokens_per_batch_size`.

Each entry is [first batch size, last batch size, K], both ends included; the first starts at 1 and the ranges do not
overlap (vllm/v1/spec_decode/dynamic/utils.py). vLLM caps every K at num_speculative_tokens, carries the last K on to
larger batches, and falls back to num_speculative_tokens with data parallelism.

The cost model proposes a schedule, eval/draft_lengths.py serves it, and only what was served is advised. It never
proposes K = 0: the drafter's first pass still runs there, and around a threshold to K = 0 throughput can collapse (vLLM
issue 49548: from 232 to 24 tok/s). Where drafts do not pay, a server without the head is the better half of two.
"""

from itertools import groupby
from typing import Any

from drafthead.evaluation.decision.cost_model import CostModel

KEY = "num_speculative_tokens_per_batch_size"
# A longer schedule for less than this is noise, and every draft length has CUDA graphs of its own.
_WORTH = 0.01

Schedule = list[list[int]]


def best_schedule(model: CostModel, max_batch: int) -> Schedule:
    """The draft length, of those that were run, that decodes fastest at every batch size; within 1 % neighbours share.

    Args:
        model: fitted.
        max_batch: the server's max_num_seqs.
    """
    among = [K for K in model.lengths if K]
    chosen: list[int] = []
    for batch in range(1, max_batch + 1):
        best = max(among, key=lambda K: model.speedup(batch, K))
        before = chosen[-1] if chosen else best
        keeps = model.speedup(batch, before) >= (1 - _WORTH) * model.speedup(batch, best)
        chosen.append(before if keeps else best)
    ranges = []
    for K, group in groupby(enumerate(chosen, 1), key=lambda pair: pair[1]):
        batches = [batch for batch, _ in group]
        ranges.append([batches[0], batches[-1], K])
    return ranges


def scheduled(config: dict[str, Any], schedule: Schedule) -> dict[str, Any]:
    """A speculative_config with the schedule filled in; one of a single range becomes a fixed K."""
    fixed = {**config, "num_speculative_tokens": max(K for _, _, K in schedule)}
    return fixed if len(schedule) == 1 else {**fixed, KEY: schedule}
