"""The recipe's section on keeping a served head good: what is captured, when it is trained on, what is promoted."""

from typing import Literal

from pydantic import Field

from drafthead.section import Section


class AdaptConfig(Section):
    """Capture, drift, training on, canary and swap (docs/adapting.md)."""

    rate: float = Field(default=0.1, ge=0, le=1)  # share of the requests with consent whose tokens are captured
    consent: Literal["asked", "given"] = "asked"  # asked: only requests that say yes; given: all that do not say no
    redact: str | None = None  # package.module:function of (prompt_ids, response_ids): what is kept of them, or None
    retention_days: float = Field(default=30, gt=0)
    retention_mib: float = Field(default=4096, gt=0)
    requests_per_day: float = Field(default=10_000, gt=0)  # for the threshold: at most one false alarm in 30 days
    reference_requests: int = Field(default=200, ge=100)  # of the head in service, that later ones are compared with
    min_tokens: int = Field(default=40_000, gt=0)  # captured since the alarm, prompts and responses, before a training
    replay_share: float = Field(default=0.25, ge=0, lt=1)  # of the trained rows: from the head's first training
    trial_requests: int = Field(default=100, ge=0)  # real ones of each head, in turns, before a promotion; 0: no trial
    worse_by: float = Field(default=0.3, gt=0)  # tokens of acceptance length that no workload may lose, at 97.5 %
