"""States in fp8 through both backends, and what the backends say of the last boundary."""

import shutil
from pathlib import Path

import pytest
import torch

from drafthead.config import Recipe
from drafthead.data.fp8 import dequantise, quantise
from drafthead.data.store import Shard, StateStore, shard_path
from drafthead.data.verify import verify_store
from drafthead.generation.plans.estimate import estimate
from drafthead.generation.states import harvest as stage
from drafthead.generation.states.inspect_states import print_verification
from drafthead.models.target import TargetHead
from drafthead.provenance import ArtefactError, read_json
from tests.damage import flip_bit
from tests.generation.small import copy_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stores(regenerated: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Recipe]:
    """Finished stores of the same responses, by backend and format."""
    made = {}
    for backend in ("vllm", "transformers"):
        for number_format in ("bf16", "fp8"):
            directory = tmp_path_factory.mktemp("formats") / f"{backend}-{number_format}"
            recipe = copy_of(regenerated, directory, backend=backend, format=number_format)
            stage.harvest(recipe)
            made[backend, number_format] = recipe
    return made


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
@pytest.mark.parametrize("split", stage.SPLITS)
def test_fp8_rounds_the_taps_and_nothing_else(stores, backend, split):
    exact, rounded = (StateStore(stores[backend, f].states_dir(split)) for f in ("bf16", "fp8"))
    assert Shard(shard_path(stores[backend, "fp8"].states_dir(split), 0)).number_format == "fp8"
    for i in range(len(exact)):
        for name in ("input_ids", "loss_mask", "last_hidden", "argmax", "lse"):
            assert torch.equal(getattr(exact[i], name), getattr(rounded[i], name)), name
        for tap, rows in exact[i].aux.items():
            assert torch.equal(rounded[i].aux[tap], dequantise(*quantise(rows)))


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_the_teacher_of_an_fp8_store_names_the_targets_argmax(stores, backend):
    recipe = stores[backend, "fp8"]
    head, agreed, total = TargetHead.load(recipe.target_path, dtype="bfloat16"), 0, 0
    for split in stage.SPLITS:
        states = StateStore(recipe.states_dir(split))
        for i in range(len(states)):
            argmax, _ = head.stats(states[i].last_hidden)
            agreed, total = agreed + int((argmax == states[i].argmax).sum()), total + len(argmax)
    assert total > 100
    assert agreed / total >= 0.995


def test_fp8_costs_little_more_than_half(stores):
    sizes = [read_json(stores["vllm", f].states_dir("train") / "manifest.json")["counts"] for f in ("bf16", "fp8")]
    assert sizes[1]["bytes_per_token"] < 0.65 * sizes[0]["bytes_per_token"]  # the teacher's rows stay in bf16


def test_the_other_format_is_refused(stores, tmp_path: Path):
    recipe = stores["vllm", "fp8"]
    states = recipe.states.model_copy(update={"format": "bf16"})
    with pytest.raises(ArtefactError, match=r"format: found 'fp8', wanted 'bf16'"):
        stage.harvest(recipe.model_copy(update={"states": states}))


def test_a_store_of_the_first_layout_is_refused(stores, tmp_path: Path):
    recipe = copy_of(stores["vllm", "fp8"], tmp_path / "old")
    identity = recipe.states_dir("train") / "identity.json"
    identity.write_text(identity.read_text().replace('"layout": 3', '"layout": 1'))
    with pytest.raises(ArtefactError, match=r"layout: found 1, wanted 3"):
        stage.harvest(recipe)
    shutil.rmtree(tmp_path / "old")


def test_backends_agree_on_the_last_boundary(stores):
    """bf16 rounding in another order: states within 5 %, log-sum-exps within it, and nearly every argmax."""
    ours, theirs = (StateStore(stores[b, "bf16"].states_dir("validation")) for b in ("vllm", "transformers"))
    agreed = total = 0
    for i in range(len(ours)):
        assert ours[i].first_row == theirs[i].first_row > 0
        wanted = theirs[i].last_hidden.float()
        assert (ours[i].last_hidden.float() - wanted).norm() < 0.05 * wanted.norm()
        torch.testing.assert_close(ours[i].lse, theirs[i].lse, rtol=0.05, atol=0.2)
        agreed += int((ours[i].argmax == theirs[i].argmax).sum())
        total += len(ours[i].argmax)
    assert agreed / total > 0.95


def test_the_transformers_backends_last_boundary_gives_the_targets_logits(regenerated: Recipe):
    from transformers import AutoModelForCausalLM

    from drafthead.generation.states.harvest_transformers import capture

    path = regenerated.target_path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    text = torch.randint(12, 3000, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    last = capture(model, text, (8,))[:, 0]
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(TargetHead.load(path, dtype="float32").logits(last), logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("number_format", ["bf16", "fp8"])
def test_the_dry_run_foretells_the_bytes_and_verification_finds_them_whole(stores, number_format, capsys):
    recipe = stores["vllm", number_format]
    for one in estimate(recipe):
        paths = recipe.states_dir(one.split).glob("shard-*")
        assert sum(path.stat().st_size for path in paths) == pytest.approx(one.disk_bytes, rel=0.01)
        assert verify_store(recipe.states_dir(one.split)) == []
    assert print_verification(recipe)


def test_verification_names_a_changed_shard(stores, tmp_path: Path, capsys):
    recipe = copy_of(stores["transformers", "fp8"], tmp_path / "changed")
    path = shard_path(recipe.states_dir("train"), 1)
    flip_bit(path)
    assert not print_verification(recipe)
    said = capsys.readouterr().out
    assert "shard-00001.safetensors has another SHA-256" in said
    assert "validation 1 shards, checksums, structure and values: whole" in said
