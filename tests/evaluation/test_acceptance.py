"""What acceptance counts in real vLLM, with random drafts; what trained ones and n-gram bring: tests/pipeline."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from drafthead.artifacts import verify_files
from drafthead.config import Recipe
from drafthead.evaluation.columns import ACCEPTANCE_COLUMNS
from drafthead.evaluation.measuring import acceptance
from drafthead.evaluation.measuring.acceptance import _shared, conditions, read_acceptance, read_conditions
from drafthead.evaluation.results.summary import summarise_acceptance, summarise_conditions
from drafthead.evaluation.workload import EvalPrompt, Workload
from tests.artifacts import ask, write_prompt_artifact
from tests.exporting.runs import recipe_at, write_random_head
from tests.generation.small import never
from tests.recipes import tiny_recipe
from tests.warm import run_warm


def write_llama(directory: Path, recipe: Recipe) -> LlamaForCausalLM:
    """A Llama with the target's vocabulary and width, for draft_model."""
    target = json.loads((Path(recipe.target_path) / "config.json").read_text())
    torch.manual_seed(0)
    shared = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    size = {name: target[name] for name in (*shared, "max_position_embeddings")}
    config = LlamaConfig(**size, intermediate_size=256, num_hidden_layers=1, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return model


def write_eagle(directory: Path, recipe: Recipe) -> None:
    """One Llama block behind a projection of embedding and hidden state, for eagle."""
    model = write_llama(directory, recipe)
    size = model.config.hidden_size
    kept = {
        name.removeprefix("model."): tensor
        for name, tensor in model.state_dict().items()
        if ".layers.0." in name and "input_layernorm" not in name  # EAGLE's block reads its input as it is
    }
    save_file({**kept, "fc.weight": torch.randn(size, 2 * size).to(torch.bfloat16)}, directory / "model.safetensors")


def write_medusa(directory: Path, recipe: Recipe) -> None:
    """Residual blocks and vocabulary heads, for medusa."""
    heads = 3
    target = json.loads((Path(recipe.target_path) / "config.json").read_text())
    size, vocabulary = target["hidden_size"], target["vocab_size"]
    directory.mkdir(parents=True)
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": size, "vocab_size": vocabulary}
    config |= {"num_heads": heads, "num_hidden_layers": 1, "truncated_vocab_size": vocabulary}
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {f"blocks.{i}.layers.0.weight": torch.zeros(size, size) for i in range(heads)}
    tensors |= {f"lm_heads.{i}.weight": torch.randn(vocabulary, size) for i in range(heads)}
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, directory / "model.safetensors")


def write_some_prompts(recipe: Recipe) -> None:
    """Six held-out prompts."""
    write_prompt_artifact(recipe, heldout=[ask(f"{i}: repeat a b c d a b c d a b c d") for i in range(6)])


_SETTINGS = ("eval.max_tokens=24", "eval.num_draft_tokens=[3,1]", "eval.temperatures=[0,0.7]")


def _measure(root: Path, head: Path, *options: str) -> Path:
    """Run the recipe script; returns the directory of its rows."""
    methods = f"eval.methods=[{{name: random, method: eagle3, head: {head}}}]"
    run_warm("eval/acceptance.py", f"output_dir={root}", methods, *_SETTINGS, *options)
    return tiny_recipe(root).results_dir / "acceptance"


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, Path]:
    """A random head, and the rows of one engine after the other."""
    recipe = recipe_at(tmp_path_factory.mktemp("one"))
    head = write_random_head(recipe)
    write_some_prompts(recipe)
    return head, _measure(Path(recipe.output_dir), head)


@pytest.mark.slow
def test_every_request_is_counted(measured):
    rows, every = read_acceptance(measured[1]), read_conditions(measured[1])
    assert rows.groupby(["method", "again"]).size().to_dict() == {
        ("none", False): 6, ("none", True): 6, ("random", False): 6,
    }  # fmt: skip
    assert (rows.loc[rows["method"] != "random", "drafts"] == 0).all()
    assert summarise_acceptance(rows).identical["random"].value == 1
    assert np.isfinite(rows["repeated"]).all()
    assert every.groupby(["method", "k", "temperature"]).size().to_dict() == {
        ("none", 0, 0.0): 12, ("none", 0, 0.7): 6,
        **{("random", k, t): 6 for k in (1, 3) for t in (0.0, 0.7)},
    }  # fmt: skip
    assert list(every.columns) == list(ACCEPTANCE_COLUMNS)
    drafted = every[every["method"] == "random"]
    assert (drafted["drafts"] > 10).all()
    assert (drafted["proposed"] <= drafted["k"] * drafted["drafts"]).all()
    assert (drafted["proposed"] > (drafted["k"] - 1) * drafted["drafts"]).all()  # the last steps may propose fewer
    assert all(sum(r) == n for r, n in zip(every.reached_at, every.proposed, strict=True) if len(r) == 1)
    assert len(summarise_conditions(every)) == 5 * 2  # four of the head and the second baseline; all and chat


@pytest.mark.slow
def test_the_baseline_of_another_recipe_is_not_measured_again(measured, tmp_path, monkeypatch):
    """Of another head on the same prompts; a damaged file of it is not taken, nor does a damaged manifest stop it."""
    head, directory = measured
    shutil.copytree(directory.parents[2], tmp_path, dirs_exist_ok=True)
    first = tmp_path / directory.relative_to(directory.parents[2])
    damaged = first / "also-none-k0-t0.7-medium.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (tmp_path / "results" / "broken" / first.name).mkdir(parents=True)
    (tmp_path / "results" / "broken" / first.name / "manifest.json").write_text("{")
    methods = f"eval.methods=[{{name: random, method: eagle3, head: {head}, num_draft_tokens: 1}}]"
    command = ("eval/acceptance.py", f"output_dir={tmp_path}", "data=tiny", *_SETTINGS, methods)
    told = run_warm(*command, "name=second")
    assert f"those of {first}: method-none.parquet" in told
    assert damaged.name not in told
    second = tmp_path / "results" / "second" / directory.name
    assert verify_files(second) == []
    assert (second / "method-none.parquet").read_bytes() == (first / "method-none.parquet").read_bytes()
    for rows in (read_acceptance(directory), read_acceptance(second)):
        assert rows.groupby(["method", "again"]).size().to_dict() == {
            ("none", False): 6, ("none", True): 6, ("random", False): 6,
        }  # fmt: skip
    third = tiny_recipe(tmp_path, *command[2:], "name=third", "eval.max_tokens=23")  # another baseline
    monkeypatch.setattr(acceptance, "run_here", never)
    with pytest.raises(AssertionError, match="a model was about to run"):
        acceptance.measure_acceptance(third)
    assert not list((tmp_path / "results" / "third").rglob("*.parquet"))


@pytest.mark.presets
def test_several_engines_make_the_rows_of_one(measured, tmp_path):
    """Two take a share each of the baseline; the head's rows are there already, of a measurement that was killed."""
    head, first = measured
    shutil.copytree(first.parents[2], tmp_path, dirs_exist_ok=True)
    directory = tmp_path / first.relative_to(first.parents[2])
    (directory / "manifest.json").unlink()
    baseline = [path for path in directory.glob("*.parquet") if "-none" in path.name]
    for path in baseline:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in directory.glob("*.parquet")}
    _measure(tmp_path, head, "--workers", "2")
    assert verify_files(directory) == []
    assert len(baseline) == 2
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for path in baseline:
        pd.testing.assert_frame_equal(pd.read_parquet(path), pd.read_parquet(first / path.name))


def test_shares_are_as_long_as_engines_allow(tmp_path):
    """Passes: three of the baseline, two of n-gram at each of two K."""
    recipe = tiny_recipe(tmp_path, "eval.methods=[ngram]", *_SETTINGS)
    workload = Workload([EvalPrompt(str(i), "chat", [i], "") for i in range(10)], 0, {})
    found = conditions(recipe)
    for workers, shares in ((1, (1, 1, 1)), (7, (3, 2, 2)), (16, (6, 4, 4))):
        jobs = _shared(tmp_path, found, {"medium": workload}, workers)
        assert tuple(Counter((j.conditions[0].method, j.conditions[0].k) for j in jobs).values()) == shares
        assert sum(job.size for job in jobs) == 7 * 10


@pytest.mark.presets
def test_drafts_of_others_are_served_side_by_side(tmp_path):
    recipe = tiny_recipe(tmp_path)
    writers = {"draft_model": write_llama, "eagle": write_eagle, "medusa": write_medusa}
    for method, write in writers.items():
        write(tmp_path / method, recipe)
    methods = ",".join(f"{{name: {m}, method: {m}, head: {tmp_path / m}}}" for m in writers)
    settings = (f"output_dir={tmp_path}", f"eval.methods=[{methods}]", "eval.max_tokens=16", "eval.num_draft_tokens=2")
    write_some_prompts(recipe)
    run_warm("eval/acceptance.py", *settings)
    rows = read_acceptance(recipe.results_dir / "acceptance")
    for method in writers:
        own = rows[rows["method"] == method]
        assert (own["proposed"] == 2 * own["drafts"]).all()
        assert own["drafts"].sum() > 0
    assert rows.groupby("method")["output_sha256"].agg(frozenset).nunique() == 1  # drafts never change greedy text
