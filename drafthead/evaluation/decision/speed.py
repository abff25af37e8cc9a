"""From measured rows to decoding speeds: what the cost model is fitted to, and what resampling prompts does to it."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from drafthead.evaluation.results.levels import ServingRows
from drafthead.evaluation.workload import BASELINE
from drafthead.statistics import Array, acceptance_by_position, acceptance_length


@dataclass(frozen=True)
class SpeedPoint:
    """Decoding speed at one load and draft length.

    Attributes:
        batch: requests in flight, at most the engine's max_num_seqs.
        K: draft tokens; None without a drafter, 0 where the drafter runs and proposes nothing.
        tpot_s: seconds per output token after the first.
        length: acceptance length there; 1 without drafts.
    """

    batch: float
    K: int | None
    tpot_s: float
    length: float = 1.0

    @property
    def step_s(self) -> float:
        """Seconds per step of the target."""
        return self.tpot_s * self.length


@dataclass(frozen=True)
class AcceptanceCurve:
    """AL(K): measured where a K was run, else from the positions of the longest draft.

    Attributes:
        measured: K -> acceptance length.
        positions: joint prefix acceptance of draft tokens 1..K at the largest K that was run.
    """

    measured: dict[int, float]
    positions: tuple[float, ...]

    @property
    def known(self) -> tuple[int, ...]:
        """Draft lengths that can be priced, ascending: acceptance beyond the longest draft was never seen."""
        return tuple(sorted({*self.measured, *range(1, len(self.positions) + 1)}))

    def length(self, K: int) -> float:
        """Acceptance length at K.

        Raises:
            ValueError: K was neither run nor shorter than a draft that was.
        """
        if K == 0:
            return 1.0
        if K in self.measured:
            return self.measured[K]
        if len(self.positions) < K:
            raise ValueError(
                f"acceptance at K = {K} was not measured; it is known at K = {', '.join(map(str, self.known))}"
            )
        return 1.0 + sum(self.positions[:K])


@dataclass(frozen=True)
class SpeedSamples:
    """Decoding times by prompt, so that prompts can be resampled.

    Attributes:
        batch, K, length: (N,) one entry per (load, method), as in SpeedPoint; K is -1 without a drafter.
        decode_s, tokens: (N, P) seconds after the first token, and tokens after it, of every prompt; 0 for a prompt
            that a level did not send.
        positions: joint prefix acceptance at the largest K.
    """

    batch: Array
    K: Array
    length: Array
    decode_s: Array
    tokens: Array
    positions: tuple[float, ...]

    def points(self, drawn: Array | None = None) -> list[SpeedPoint]:
        """The points over all prompts, or over a resampling of them, given as (P,) how often each is drawn."""
        times = np.ones(self.tokens.shape[1]) if drawn is None else drawn
        tpot = (self.decode_s @ times) / (self.tokens @ times)
        return [
            SpeedPoint(float(b), None if k < 0 else int(k), float(t), float(a))
            for b, k, t, a in zip(self.batch, self.K, tpot, self.length, strict=True)
        ]


def speed_samples(rows: ServingRows, method: str, max_batch: int) -> SpeedSamples:
    """What the cost model needs of the baseline and one method, blocks pooled.

    Args:
        rows: of one workload, under loads without a request rate.
        method: name of the method that drafts.
        max_batch: the engine's max_num_seqs: more requests in flight wait and are not in the batch.
    """
    requests, runs = rows
    chosen = runs[runs["arm"].isin((BASELINE, method))]
    good = requests[(requests["error"] == "") & requests["arm"].isin((BASELINE, method))]
    good = good.assign(decode_s=good["e2e_s"] - good["ttft_s"], tokens=good["output_tokens"] - 1)
    prompts = sorted(good["prompt_id"].unique())
    keys = ["arm", "k", "load"]
    seconds, tokens = (
        good.pivot_table(index=keys, columns="prompt_id", values=value, aggfunc="sum", fill_value=0.0)[prompts]
        for value in ("decode_s", "tokens")
    )
    # What was asked for, where it was reached: a batch that differs by noise is no other load.
    chosen = chosen.assign(batch=chosen["running"].where(~chosen["reached"].astype(bool), chosen["concurrency"]))
    pooled = chosen.groupby(keys).agg({"batch": "mean", "drafts": "sum", "accepted": "sum"}).loc[seconds.index]
    plain = pooled.index.get_level_values("arm") == BASELINE
    K = pooled.index.get_level_values("k").to_numpy()
    length = [
        acceptance_length([d], [a]) if d else 1.0 for d, a in zip(pooled["drafts"], pooled["accepted"], strict=True)
    ]
    longest = chosen[(chosen["arm"] == method) & (chosen["k"] == K[~plain].max(initial=0))]
    return SpeedSamples(
        batch=np.minimum(pooled["batch"].to_numpy(float), max_batch),
        K=np.where(plain, -1, K).astype(float),
        length=np.array(length),
        decode_s=seconds.to_numpy(float),
        tokens=tokens.to_numpy(float),
        positions=_positions(longest),
    )


def _positions(runs: pd.DataFrame) -> tuple[float, ...]:
    if "accepted_at" not in runs or not runs["drafts"].sum():
        return ()
    found = acceptance_by_position(runs["drafts"], np.stack(list(runs["accepted_at"])))
    return tuple(map(float, found.unconditional))
