"""Rates that somebody measured."""

from drafthead.config import REPO_ROOT
from drafthead.models.target import load_target_spec
from drafthead.serving.rates import MEASURED


def test_measured_rates_name_their_run():
    for path, stages in MEASURED.items():
        assert load_target_spec(str(REPO_ROOT / path))
        for rate in stages.values():
            assert "python " in rate.source
            assert "2026-" in rate.source
