"""The draft length by batch size, as vLLM takes it: `num_speculative_tokens_per_batch_size`.

Each entry is [first batch size, last batch size, K], both ends included; the first starts at 1 and the ranges do not
overlap (vllm/v1/spec_decode/dynamic/utils.py). vLLM caps every K at num_speculative_tokens, carries the last K on to
larger batches, and falls back to num_speculative_tokens with data parallelism. At K = 0 the drafter's first pass still
runs; only a server without the head does without.
"""

from itertools import groupby
from typing import Any

from drafthead.evaluation.decision.cost_model import CostModel

KEY = "num_speculative_tokens_per_batch_size"
# A longer schedule for less than this is noise, and every draft length has CUDA graphs of its own.
_WORTH = 0.01

Schedule = list[list[int]]


def best_schedule(model: CostModel, max_batch: int) -> Schedule:
    """The draft length that decodes fastest at every batch size; neighbours within 1 % of the best share one.

    Args:
        model: fitted; draft lengths outside the range of those that were run do not appear.
        max_batch: the engine's max_num_seqs.
    """
    among = [K for K in model.curve.known if min(model.lengths) <= K <= max(model.lengths)]
    chosen: list[int] = []
    for batch in range(1, max_batch + 1):
        best = model.best_draft(batch, among)
        before = chosen[-1] if chosen else best
        keeps = model.speedup(batch, before) >= (1 - _WORTH) * model.speedup(batch, best)
        chosen.append(before if keeps else best)
    ranges = []
    for K, group in groupby(enumerate(chosen, 1), key=lambda pair: pair[1]):
        batches = [batch for batch, _ in group]
        ranges.append([batches[0], batches[-1], K])
    return ranges


def scheduled(config: dict[str, Any], schedule: Schedule) -> dict[str, Any] | None:
    """A speculative_config with the schedule filled in; None when the schedule never drafts.

    Args:
        config: of the head, at any fixed K.
        schedule: as `best_schedule` gives it; one that has a single range becomes a fixed K.
    """
    longest = max(K for _, _, K in schedule)
    if longest == 0:
        return None
    fixed = {**config, "num_speculative_tokens": longest}
    return fixed if len(schedule) == 1 else {**fixed, KEY: schedule}


def draft_length(schedule: Schedule, batch: int) -> int:
    """K at a batch size; larger ones than any range get the last range's."""
    return next((K for _, last, K in schedule if batch <= last), schedule[-1][2])
