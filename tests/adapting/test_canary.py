"""The rule of promotion, on requests whose acceptance is known."""

import json

import pandas as pd
import pytest

from drafthead.adapting.drift import decide
from tests.adapting.records import requests


def answered(*parts: tuple[str, int, float], seed: int, paired: bool = True) -> pd.DataFrame:
    """A head's rows: (category, prompts, share of drafts it accepts)."""
    rows = [r for i, (name, n, rate) in enumerate(parts) for r in requests(n, rate, workload=name, seed=seed + i)]
    frame = pd.DataFrame(rows).rename(columns={"workload": "category"})
    return frame.assign(prompt_id=[f"p{i}" for i in range(len(frame))]) if paired else frame


@pytest.mark.parametrize("paired", [True, False])
def test_a_better_candidate_is_promoted_and_an_equal_or_worse_one_is_not(paired):
    served = answered(("code", 100, 0.5), seed=0, paired=paired)
    better = decide(served, answered(("code", 100, 0.65), seed=0, paired=paired), 0.3)
    assert better.promoted
    assert better.gains["all"].low > 0
    assert not decide(served, served, 0.3).promoted
    assert not decide(served, answered(("code", 100, 0.4), seed=0, paired=paired), 0.3).promoted
    # By chance alone: other requests, drawn at the same rate.
    chances = [decide(served, answered(("code", 100, 0.5), seed=s, paired=paired), 0.3).promoted for s in range(1, 21)]
    assert sum(chances) <= 3


def test_a_gain_over_all_does_not_pay_for_a_loss_on_one_workload():
    served = answered(("code", 100, 0.4), ("chat", 40, 0.7), seed=0)
    worse_on_chat = answered(("code", 100, 0.7), ("chat", 40, 0.5), seed=0)
    decision = decide(served, worse_on_chat, 0.3)
    assert not decision.promoted
    assert "chat" in decision.why
    assert decide(served, answered(("code", 100, 0.7), ("chat", 40, 0.7), seed=0), 0.3).promoted
    assert decide(served, worse_on_chat, 5.0).promoted  # the bound is what refused it


def test_small_workloads_are_judged_together():
    served = answered(("code", 60, 0.4), ("a", 10, 0.7), ("b", 10, 0.7), seed=0)
    decision = decide(served, answered(("code", 60, 0.7), ("a", 10, 0.3), ("b", 10, 0.3), seed=0), 0.3)
    assert not decision.promoted
    assert "others" in decision.gains
    assert "a" not in decision.gains


def test_a_workload_of_one_prompt_has_no_figures():
    served = answered(("code", 40, 0.5), ("a", 1, 0.5), seed=0)
    figures = decide(served, answered(("code", 40, 0.7), ("a", 1, 0.7), seed=0), 0.3).figures()
    assert set(figures) == {"all", "code"}
    json.dumps(figures, allow_nan=False)


def test_a_few_prompts_decide_nothing():
    assert not decide(answered(("code", 10, 0.3), seed=0), answered(("code", 10, 0.9), seed=0), 0.3).promoted


def test_pairs_are_matched_by_prompt_not_by_order():
    served = answered(("code", 40, 0.5), seed=0)
    shuffled = served.sample(frac=1, random_state=0)
    gain = decide(served, shuffled, 0.3).gains["all"]
    assert (gain.low, gain.high) == (0, 0)
