"""Published experiments in miniature, through real servers: `redhat` always, the others in `make presets`."""

from pathlib import Path

import pytest

from drafthead.evaluation.columns import REQUEST_COLUMNS, RUN_COLUMNS
from drafthead.evaluation.presets import preset_names
from drafthead.evaluation.serving import read_requests, read_runs
from drafthead.provenance import require, verify_files
from tests.pipeline.conftest import overrides_for, run_ok

_PATIENCE_S = 1800  # techniques starts five servers, which answer 48 levels each


def _run(recipe, preset: str, *more: str):
    overrides = overrides_for(Path(recipe.output_dir), *more)
    printed = run_ok("eval/serving.py", ("--preset", preset, "--miniature", *overrides), timeout_s=_PATIENCE_S)
    directory = recipe.results_dir / f"serving-{preset}-miniature"
    require(directory, "serving", "the preset")
    assert verify_files(directory) == []
    requests, runs = read_requests(directory), read_runs(directory)
    assert list(requests.columns) == list(REQUEST_COLUMNS)
    assert list(runs.columns) == list(RUN_COLUMNS)
    assert not runs["failed"].any()
    # Arms answer the same prompts at every level.
    sent = requests.groupby(["workload", "load", "arm", "k"])["prompt_id"].agg(frozenset)
    assert (sent.groupby(["workload", "load"]).nunique() == 1).all()
    drafted = runs[runs["k"] > 0]
    assert (drafted["accepted"] == drafted["accepted_at"].map(sum)).all()
    return printed, runs


@pytest.mark.slow
def test_redhat_in_miniature(tiny_run):
    printed, runs = _run(tiny_run, "redhat")
    assert set(zip(runs["arm"], runs["k"], strict=True)) == {("none", 0), ("eagle3", 3)}
    assert set(runs["workload"]) == {"sharegpt", "mlperf", "swe-bench"}
    assert set(runs["load"]) == {"c1", "c2"}
    assert runs["server_command"].str.contains("--stream-interval").all()
    assert (runs.loc[runs["arm"] == "eagle3", "drafts"] > 0).all()
    assert "Left out: tensor parallelism 2" in " ".join(printed.split())


@pytest.mark.presets
@pytest.mark.timeout(_PATIENCE_S)
@pytest.mark.parametrize("preset", [name for name in preset_names() if name != "redhat"])
def test_every_other_preset_in_miniature(tiny_run, preset):
    printed, runs = _run(tiny_run, preset)
    assert (runs.loc[runs["arm"] == "eagle3", "drafts"] > 0).all()
    if preset == "techniques":
        assert "medusa: no arm of the recipe has a head" in " ".join(printed.split())
        head = runs[runs["arm"] == "eagle3"].groupby("temperature")[["drafts", "accepted"]].sum()
        lengths = 1 + head["accepted"] / head["drafts"]
        assert lengths[0.5] > 0.6 * lengths[0.0]  # the CPU build, unrepaired, accepts next to nothing above 0


@pytest.mark.presets
@pytest.mark.timeout(_PATIENCE_S)
def test_a_schedule_of_draft_lengths_beside_fixed_ones(tiny_run):
    """vLLM drafts three tokens for one request and one for several, as the schedule says."""
    settings = (
        "eval.num_draft_tokens=[3,1]", "eval.concurrency=[1,4]", "eval.prompts_per_level=8", "eval.max_tokens=32",
    )  # fmt: skip
    schedule = ("--schedule", "[[1,1,3],[2,64,1]]")
    overrides = overrides_for(Path(tiny_run.output_dir), *settings)
    printed = run_ok("eval/draft_lengths.py", (*schedule, *overrides), timeout_s=_PATIENCE_S)
    assert "the best fixed draft length of this traffic" in printed
    runs = read_runs(tiny_run.results_dir / "draft-lengths" / "schedule")
    assert [(run.arm, run.k) for run in runs[runs["block"] == 0].itertuples()][::2] == [
        ("none", 0), ("eagle3", 3), ("eagle3", 1), ("schedule", 3),
    ]  # fmt: skip
    drafted = runs[runs["k"] > 0].groupby(["arm", "k", "concurrency"])[["proposed", "drafts"]].sum()
    proposed = drafted["proposed"] / drafted["drafts"]
    assert proposed["eagle3", 3, 4] == pytest.approx(3, abs=0.2)
    assert proposed["schedule", 3, 1] == pytest.approx(3, abs=0.2)
    assert proposed["schedule", 3, 4] < 1.5
