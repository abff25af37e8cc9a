"""Capturing on a GPU: no step waits for copies, and what the connector holds there is outside vLLM's budget."""

import json
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from drafthead.config import REPO_ROOT, load_recipe
from drafthead.engine import generate, offline
from drafthead.target.pieces import load_target_spec
from tests.scripts import run_ok


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for a device that does nothing")
def test_the_engine_waits_for_no_copy():
    assert json.loads(run_ok("-m", "tests.gpu.fake_capture").splitlines()[-1]) == {}


def test_head_and_rows_are_taken_off_the_engines_share(public_targets, monkeypatch):
    recipe = load_recipe(REPO_ROOT / "configs" / "gpt-oss-120b.yaml")
    spec, started = load_target_spec(recipe.target_path), {}
    offline.import_vllm()

    @contextmanager
    def engine(recipe, **options):
        started.update(options)
        yield

    platform = SimpleNamespace(get_device_total_memory=lambda: 100 * 2**30)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setattr(generate, "on_cpu", lambda: False)
    monkeypatch.setattr(generate, "offline_engine", engine)
    with generate.capturing_engine(recipe, spec):
        pass
    head, logits, rows = 201_088 * 2880 * 2, 2 * 512 * 201_088 * 4, 2 * 16_384 * 4 * 2880 * 2
    reserved = (head + logits + rows) / (100 * 2**30)
    assert started["gpu_memory_utilization"] == pytest.approx(recipe.engine.gpu_memory_utilization - reserved)
