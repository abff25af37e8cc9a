"""The other drafters on the store that the embedded recipe harvested, trained and compared by one command."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml
from safetensors.torch import load_file

from drafthead.artifacts import require
from drafthead.config import REPO_ROOT, load_recipe
from drafthead.evaluation.columns import read_rows
from drafthead.exporting.check import TOLERANCE
from tests.pipeline.model_runners import accepted
from tests.pipeline.small_run import overrides_for
from tests.scripts import run_here
from tests.warm import run_warm, warm

pytestmark = pytest.mark.slow
K = 3
KINDS = {"dflash": "DFlash", "dspark": "DSpark"}


@pytest.fixture(scope="module")
def compared(tiny_run, tmp_path_factory) -> tuple[Path, tuple[str, ...], str]:
    """Where heads of two layers lie, the command that made them, and what it printed."""
    root = tmp_path_factory.mktemp("compared")
    (root / "data").mkdir()
    for own in ("", "-dspark"):  # a variant that changes the engine has data of its own, which is there already
        (root / "data" / (tiny_run.name + own)).symlink_to(Path(tiny_run.output_dir) / "data" / tiny_run.name)
    variants = {kind: [f"head.type={kind}"] for kind in (*KINDS, "peagle")}
    variants["dspark"] += ["engine.max_num_seqs=32", "head.anchor_share=0.5"]
    (root / "variants.yaml").write_text(yaml.safe_dump(variants))
    settings = ("name=all", f"data={tiny_run.name}", "train.epochs=2", "eval.max_tokens=48")
    command = (
        "eval/compare.py", *overrides_for(root, *settings), "--variants", str(root / "variants.yaml"),
        "--heads", *KINDS, "--mask-token-id", "9", "--layers", "2", "--seeds", "0", "--lengths", str(K), "--no-control",
    )  # fmt: skip
    return root, command, run_warm(*command)


@pytest.fixture(params=KINDS)
def recipe(request, compared):
    return recipe_of(compared[0], request.param)


def recipe_of(root, kind):
    head = (f"head.type={kind}", "head.mask_token_id=9")
    return load_recipe(overrides=overrides_for(root, f"name=all-{kind}_l2_s0", *head))


def test_it_learns_and_is_served_as_predicted(recipe):
    check_learning_and_serving(recipe)


def check_learning_and_serving(recipe):
    lines = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    counts = require(recipe.head_dir, "head", "")["counts"]
    if recipe.head.type == "dspark":  # model runner V2 serves it, on GPUs
        assert counts["serve_check"] is None
        return
    check = counts["serve_check"]
    assert check["predicted"] > 1.15, "a head that is never accepted proves nothing"
    assert check["served"] == pytest.approx(check["predicted"], rel=TOLERANCE)


def test_a_drafter_that_does_not_know_the_tokens_between_learns_up_to_the_first_rejected_draft(recipe):
    """At the first step hardly a draft is accepted, so no loss is counted at the last position."""
    first = json.loads((recipe.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["loss_per_step"][-1] < 0.1) == (recipe.head.type == "dflash")
    card = (recipe.head_dir / "README.md").read_text()
    assert KINDS[recipe.head.type] in card
    assert ("forward_kl up to the first rejected draft" in card) == (recipe.head.type == "dflash")


def test_the_table_has_what_was_counted(compared):
    (root, _, printed), lengths = compared, {}
    for kind in KINDS:
        rows = pd.read_parquet(root / "results" / f"all-{kind}_l2_s0" / "heads.parquet")
        assert set(rows["how"]) == ({"replayed"} if kind == "dspark" else {"served", "replayed"})
        assert set(rows["k"]) == {K}
        steps = pd.read_json(root / "runs" / f"all-{kind}_l2_s0" / "metrics.jsonl", lines=True)["step_seconds"]
        assert rows["seconds"].to_numpy() == pytest.approx(steps.sum())
        for how, counted in rows.groupby("how"):
            lengths[kind, how] = length = 1 + counted["accepted"].sum() / counted["drafts"].sum()
            assert f"{length:.2f} [" in printed
    assert f"{100 * (lengths['dspark', 'replayed'] / lengths['dflash', 'replayed'] - 1):+.1f} [" in printed


def test_rows_of_another_recipe_are_not_taken_for_its_own(compared):
    _, command, _ = compared
    refused = warm().run(*command, "--heads", "dflash", "train.epochs=1")
    assert refused.returncode
    assert "train.epochs: found 2, wanted 1" in refused.stderr


@pytest.mark.parametrize(
    ("text", "more", "named"),
    [
        ("deep: [head.num_layers=2]", [], r"deep: head.num_layers=2 is no variant"),
        ("wide: head.num_layers=2", [], "section.key=value"),
        ("wide: [head.num_layer=2]", [], "num_layer"),
        ("wide: [head.num_layers=2]", ["--heads", "narrow"], "wide"),
        (None, ["--heads", "dflash"], "--mask-token-id"),
        (None, ["--heads", "dspark", "--mask-token-id", "9", "--serve"], "--serve: .*no dspark head"),
    ],
)
def test_variants_that_cannot_be_trained_or_served_are_refused(text, more, named, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("drafthead.engine.offline.on_cpu", lambda: True)
    if text is not None:
        (tmp_path / "variants.yaml").write_text(text)
        more = ["--variants", str(tmp_path / "variants.yaml"), *more]
    assert run_here("eval/compare.py", f"output_dir={tmp_path}", *more) == 1
    assert not (tmp_path / "data").exists()  # nor trained
    assert re.search(named, capsys.readouterr().err)


def test_the_variants_of_the_study_are_recipes():
    for name, overrides in yaml.safe_load((REPO_ROOT / "benchmarks/quality.yaml").read_text()).items():
        mask = ["head.mask_token_id=9"] if any(text.startswith("head.type=") for text in overrides) else []
        load_recipe(overrides=[f"name={name}", "eval.num_draft_tokens=1", *mask, *overrides])


def test_the_confidence_head_has_learned(compared):
    tensors = load_file(compared[0] / "heads" / "all-dspark_l2_s0" / "model.safetensors")
    assert tensors["confidence_head.proj.weight"].abs().max() > 0


@pytest.mark.long
def test_a_dspark_head_is_served_by_model_runner_v2(compared, tmp_path):
    """Its Triton kernels interpreted: on a CPU slower than drafting is worth, but the head is accepted."""
    pytest.importorskip("triton")
    head = compared[0] / "heads" / "all-dspark_l2_s0"
    assert "acceptance length" in accepted("V2", head, tmp_path, "head.type=dspark", "head.mask_token_id=9")


@pytest.mark.presets
def test_served_under_load_every_head_has_its_line(compared):
    root, command, _ = compared
    load = ("eval.concurrency=[2]", "eval.prompts_per_level=8", "eval.workloads=all")
    run_warm(*command, "--heads", "peagle", "dflash", "--serve", *load)
    check_learning_and_serving(recipe_of(root, "peagle"))
    runs = read_rows(root / "results" / "all-served" / "serving", "runs-*.parquet")
    report = (root / "results" / "all-served" / "report.md").read_text().replace("\\", "")
    lines = [[cell.strip() for cell in line.split("|")] for line in report.splitlines()]
    for kind in ("peagle", "dflash"):
        own = runs[(runs["method"] == f"{kind}_l2") & (runs["workload"] == "all")]
        line = next(line for line in lines if line[1:4] == ["all", "2", f"{kind}_l2, K = {K}"])
        assert f"{own['output_tokens'].sum() / own['duration_s'].sum():.1f}" in " ".join(line).split()
