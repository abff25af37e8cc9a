"""The whole chain through real vLLM and real DeepSpeed, and what its head must be worth."""

import json

import pytest
from safetensors import safe_open

from drafthead import provenance
from drafthead.core.acceptance import Acceptance
from drafthead.evaluation.acceptance import BASELINE_AGAIN, measure_acceptance, read_acceptance
from tests.pipeline.conftest import run_ok, run_script

pytestmark = pytest.mark.slow


def test_every_stage_left_a_whole_artefact(tiny_run):
    for directory, kind in (
        (tiny_run.prompts_dir, "prompts"),
        (tiny_run.responses_dir("train"), "responses"),
        (tiny_run.responses_dir("validation"), "responses"),
        (tiny_run.states_dir("train"), "states"),
        (tiny_run.states_dir("validation"), "states"),
        (tiny_run.run_dir, "run"),
        (tiny_run.head_dir, "head"),
    ):
        provenance.require(directory, kind, "the chain")
        assert provenance.verify_files(directory) == []


def test_the_draft_vocabulary_is_smaller_than_the_targets(tiny_run):
    with safe_open(tiny_run.head_dir / "model.safetensors", framework="pt") as file:
        offsets, mask = file.get_tensor("d2t"), file.get_tensor("t2d")
    assert len(offsets) == tiny_run.head.draft_vocab_size < len(mask)
    assert offsets.any(), "d2t is not exercised when every offset is zero"


def test_rerun_does_nothing_twice(tiny_run):
    overrides = (f"output_dir={tiny_run.output_dir}", *_overrides(tiny_run))
    for script in ("data_gen/prompts.py", "data_gen/regenerate.py", "data_gen/harvest.py", "export/head.py"):
        before = _files(tiny_run)
        run_ok(script, overrides)
        assert _files(tiny_run) == before, script


def _overrides(recipe) -> tuple[str, ...]:
    from tests.pipeline.conftest import SMALL_RUN

    return SMALL_RUN


def _files(recipe) -> dict:
    from pathlib import Path

    return {p: p.stat().st_mtime_ns for p in Path(recipe.output_dir).rglob("*") if p.is_file()}
