"""The recipe's sections on what a head is deployed for: traffic, and the service level it must keep."""

from typing import Literal, Self

from pydantic import Field, model_validator

from drafthead.section import Section


class TrafficConfig(Section):
    """What the deployment serves; the verdict is about this and nothing else."""

    # Requests in flight -> share of the time; None: every measured load alike.
    concurrency: dict[int, float] | None = None
    workload: str | None = None  # of those measured; None: all prompts, and conversations where the head loses on them

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        for load, share in (self.concurrency or {}).items():
            if load <= 0 or share <= 0:
                raise ValueError(f"traffic.concurrency {load}: {share} must both be positive; leave out an empty load")
        return self

    def shares(self, measured: tuple[int, ...]) -> dict[int, float]:
        """Requests in flight -> share, summing to 1; every measured load alike where the recipe says nothing."""
        given = self.concurrency or dict.fromkeys(measured, 1.0)
        total = sum(given.values())
        return {load: share / total for load, share in sorted(given.items())}


class SLOConfig(Section):
    """The service level: a load at which it is missed is no load to deploy at. None: no limit."""

    ttft_ms: float | None = Field(default=None, gt=0)  # time to first token
    tpot_ms: float | None = Field(default=None, gt=0)  # time per output token after it
    percentile: Literal[50, 90, 95, 99] = 95  # of requests that must keep it
