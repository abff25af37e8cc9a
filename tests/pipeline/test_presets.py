"""Published experiments in miniature, through real servers (`make presets`)."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from drafthead.artifacts import require, verify_files
from drafthead.engine.server import parse_metrics, server_environment
from drafthead.evaluation.columns import REQUEST_COLUMNS, RUN_COLUMNS, read_rows
from drafthead.evaluation.measuring.presets import load_preset, preset_names
from drafthead.progress import wait_until
from tests.evaluation.rows import counted
from tests.pipeline.small_run import overrides_for
from tests.scripts import free_port, run_ok

_PATIENCE_S = 1800  # techniques starts five servers, which answer 48 levels each


def _run(recipe, preset: str, *more: str):
    overrides = overrides_for(Path(recipe.output_dir), "eval.price_per_gpu_hour=3", *more)
    printed = run_ok("eval/serving.py", "--preset", preset, "--miniature", *overrides, timeout_s=_PATIENCE_S)
    directory = recipe.results_dir / f"serving-{preset}-miniature"
    require(directory, "serving", "the preset")
    assert verify_files(directory) == []
    requests, runs = counted(directory)
    assert list(requests.columns) == list(REQUEST_COLUMNS)
    assert list(runs.columns) == list(RUN_COLUMNS)
    assert not runs["failed"].any()
    # Every method gets the same prompts at a level.
    sent = requests.groupby(["workload", "load", "method", "k"])["prompt_id"].agg(frozenset)
    assert (sent.groupby(["workload", "load"]).nunique() == 1).all()
    drafted = runs[runs["k"] > 0]
    assert (drafted["accepted"] == drafted["accepted_at"].map(sum)).all()
    report = (recipe.results_dir / f"{preset}-miniature" / "report.md").read_text()
    assert "### Acceptance by position\n" in report
    assert all(f"## {sweep.title}\n" in report for sweep in load_preset(preset).sweeps)
    return printed, report, runs


@pytest.mark.presets
@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_runs_in_miniature(tiny_run, preset):
    printed, report, runs = _run(tiny_run, preset)
    assert (runs.loc[runs["method"] == "head", "drafts"] > 0).all()
    if preset == "redhat":
        assert set(zip(runs["method"], runs["k"], strict=True)) == {("none", 0), ("head", 3)}
        assert set(runs["workload"]) == {"sharegpt-first", "mlperf-gpt-oss", "swe-bench"}
        assert set(runs["load"]) == {"c1", "c2"}
        assert not runs["server_command"].str.contains("--stream-interval").any()
        assert "Geometric means" in report
        assert "| TTFOT, P95 (ms) |" in report
        assert (runs["temperature"] == 1).all()
        assert "tensor parallelism 2" in " ".join(printed.split())
    if preset == "techniques":
        assert "medusa: " in printed
        assert {"mixed", "code"} <= set(runs["workload"])
        assert "What keeps a service level" in report
        head = runs[runs["method"] == "head"].groupby("temperature")[["drafts", "accepted"]].sum()
        lengths = 1 + head["accepted"] / head["drafts"]
        assert lengths[0.5] > 0.6 * lengths[0.0]  # the CPU build, unrepaired, accepts next to nothing above 0


@pytest.mark.presets
def test_a_schedule_of_draft_lengths_is_measured_beside_fixed_ones(tiny_run):
    """vLLM drafts three tokens for one request and one for several, as the schedule says."""
    settings = (
        "eval.num_draft_tokens=[3,1]", "eval.concurrency=[1,4]", "eval.prompts_per_level=8", "eval.max_tokens=32",
    )  # fmt: skip
    schedule = ("--schedule", "[[1,1,3],[2,64,1]]")
    overrides = overrides_for(Path(tiny_run.output_dir), *settings)
    run_ok("eval/draft_lengths.py", *schedule, *overrides, timeout_s=_PATIENCE_S)
    directory = tiny_run.results_dir / "draft-lengths" / "schedule"
    runs = read_rows(directory, "runs-*.parquet").query("workload == 'all'")
    assert [(run.method, run.k) for run in runs[runs["block"] == 0].itertuples()][::2] == [
        ("none", 0), ("head", 3), ("head", 1), ("schedule", 3),
    ]  # fmt: skip
    drafted = runs[runs["k"] > 0].groupby(["method", "k", "concurrency"])[["proposed", "drafts"]].sum()
    proposed = drafted["proposed"] / drafted["drafts"]
    assert proposed["head", 3, 4] == pytest.approx(3, abs=0.2)
    assert proposed["schedule", 3, 1] == pytest.approx(3, abs=0.2)
    assert proposed["schedule", 3, 4] < 1.5


@pytest.mark.presets
def test_the_speculators_layout_needs_no_target_named(tiny_run, tmp_path):
    """The head's directory is the model; nothing else is given but a port, and no CUDA graphs."""
    run_ok("export/head.py", *overrides_for(Path(tiny_run.output_dir)), "export.format=speculators", "--no-serve-check")
    head = tiny_run.head_dir.with_name("tiny-speculators")
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(head), "--enforce-eager"]
    log, environment = tmp_path / "serve.log", os.environ | server_environment(tiny_run)
    with (
        log.open("w") as out,
        subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out, env=environment) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or "startup complete" in log.read_text(), "vllm serve")
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
                request = {"prompt": [5, 6, 7, 8], "max_tokens": 32, "temperature": 0, "ignore_eos": True}
                response = client.post("/v1/completions", json=request | {"model": str(head)}).json()
                drafts = parse_metrics(client.get("/metrics").text)["vllm:spec_decode_num_drafts"]
        finally:
            process.terminate()
    assert response["usage"]["completion_tokens"] == 32
    assert 0 < drafts < 32
