"""Rates that somebody measured."""

from drafthead.config import REPO_ROOT
from drafthead.engine.rates import MEASURED
from drafthead.target.pieces import load_target_spec


def test_measured_rates_name_their_run():
    for path, stages in MEASURED.items():
        assert load_target_spec(str(REPO_ROOT / path))
        for rate in stages.values():
            assert "python " in rate.source
            assert "2026-" in rate.source
