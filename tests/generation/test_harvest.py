"""The state stores of both backends, in bf16 and fp8: right rows, the same bytes after a resume, no foreign states."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafthead.artifacts import ArtifactError, read_json
from drafthead.config import Recipe
from drafthead.data.responses import LEARNED_PROMPT, ResponseTokens
from drafthead.data.shard import Shard, quantise, shard_path, write_shard
from drafthead.data.store import StateStore, verify_store
from drafthead.drafters.batch import dequantise
from drafthead.drafters.registry import drafter_of
from drafthead.generation import harvest as stage
from drafthead.generation.shards import ShardJob, list_jobs
from drafthead.planning import Assumed
from drafthead.planning.stages import amount_of, states_bytes
from drafthead.target.spec import load_target_spec, recipe_spec
from drafthead.training.inputs import open_inputs, survey
from tests import artifacts
from tests.artifacts import read_responses
from tests.damage import half_written
from tests.generation.small import copy_of, never, small_recipe
from tests.rounding import rounding
from tests.scripts import start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stores(
    regenerated: Recipe, harvested: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Recipe]:
    """Finished stores of the same responses, by backend and format."""
    made = {("vllm", "bf16"): harvested}
    for backend, number_format in (("vllm", "fp8"), ("transformers", "bf16")):
        directory = tmp_path_factory.mktemp("formats") / f"{backend}-{number_format}"
        made[backend, number_format] = copy_of(regenerated, directory, backend=backend, format=number_format)
        stage.harvest(made[backend, number_format])
    return made


def test_stores_hold_the_responses_with_their_masks_and_say_how_many(harvested: Recipe):
    for split in stage.SPLITS:
        responses, states = read_responses(harvested.responses_dir(split)), StateStore(harvested.states_dir(split))
        assert len(states) == len(responses)
        for i, response in enumerate(responses):
            sequence = states[i]
            assert sequence.id == response.id
            whole = [*response.prompt_ids, *response.response_ids, *response.continuation_ids]
            assert sequence.input_ids.tolist() == whole
            expected = [0] * len(response.prompt_ids) + [1] * len(response.response_ids)
            assert sequence.loss_mask.tolist() == expected + [0] * len(response.continuation_ids)
            assert sequence.aux[2].dtype == torch.bfloat16
    counts = read_json(harvested.states_dir("validation") / "manifest.json")["counts"]
    assert counts["sequences"] == 4
    assert counts["argmax_agreement"] > 0.95
    # three aux layers in bf16, ids and mask; the last boundary, argmax and lse only where loss can lie
    states = StateStore(harvested.states_dir("validation"))
    tail = sum(states[i].num_tokens - states[i].first_teacher_row for i in range(4)) / counts["tokens"]
    assert 0.1 < tail < 0.9
    assert counts["bytes_per_token"] == pytest.approx(3 * 192 * 2 + 5 + tail * (192 * 2 + 8), rel=0.05)


@pytest.mark.parametrize("share", [0.3, 1])
def test_prompts_that_are_learned_have_teacher_rows_and_nothing_else_differs(stores, tmp_path: Path, share):
    recipe = stores["transformers", "bf16"]
    learning = copy_of(recipe, tmp_path / "learning", prompt_loss=share)
    with pytest.raises(ArtifactError, match=f"prompt_loss: found 0.0, wanted {share}"):
        open_inputs(learning)
    for split in stage.SPLITS:
        shutil.rmtree(learning.states_dir(split))
    stage.harvest(learning)
    texts = ResponseTokens(learning.responses_dir("train"), learning.states.learned_share("train"))
    for split, mask_of_prompts in (("train", LEARNED_PROMPT), ("validation", 0)):
        plain, store_learning_prompts = (StateStore(r.states_dir(split)) for r in (recipe, learning))
        for i in range(len(plain)):
            prompts = plain[i].first_teacher_row + 1
            unread = prompts - round(share * prompts)  # at their beginning
            mask = [0] * unread + [mask_of_prompts] * (prompts - unread) + plain[i].loss_mask[prompts:].tolist()
            assert store_learning_prompts[i].loss_mask.tolist() == mask
            assert store_learning_prompts[i].first_teacher_row == (
                max(unread - 1, 0) if split == "train" else prompts - 1
            )
            assert all(torch.equal(store_learning_prompts[i].aux[layer], rows) for layer, rows in plain[i].aux.items())
            for name in ("last_hidden", "argmax", "lse"):
                assert torch.equal(
                    getattr(store_learning_prompts[i], name)[-len(plain[i].lse) :], getattr(plain[i], name)
                ), name
            if split == "train":  # what training reads while the states are still being harvested
                assert [part.tolist() for part in texts.tokens(i)] == [
                    part.tolist() for part in store_learning_prompts.tokens(i)
                ]
        path = shard_path(learning.states_dir(split), 0)
        planned = states_bytes(learning, recipe_spec(learning), amount_of(learning, split, Assumed()), split)
        assert sum(p.stat().st_size for p in path.parent.glob("shard-*")) == pytest.approx(planned, rel=0.01)
    store = StateStore(learning.states_dir("train"))
    documents = [store[i] for i in range(len(store))]
    hits = []
    for s in documents:
        text, mask = s.input_ids[s.first_teacher_row + 1 :], s.loss_mask[s.first_teacher_row + 1 :]
        hits.append((s.argmax[:-1] == text)[mask == LEARNED_PROMPT])
    assert torch.cat(hits).float().mean() > 0.4
    agreement = [stage.argmax_agreement(map(as_if_greedy, list_jobs(r, "train"))) for r in (recipe, learning)]
    assert agreement[0] == agreement[1] > 0.5
    before, after = (
        survey(StateStore(r.states_dir("train")), 3072, 2048, drafter_of(r.head)) for r in (recipe, learning)
    )
    assert torch.equal(before.generated, after.generated)  # what a draft vocabulary is chosen by
    learned = sum(int(s.loss_mask[2:].count_nonzero()) for s in documents)  # a root stands two before what it predicts
    assert sum(w.valid[0] for w in after.windows) == learned > sum(w.valid[0] for w in before.windows)
    assert open_inputs(learning).train.ids == open_inputs(recipe).train.ids


def as_if_greedy(job: ShardJob) -> ShardJob:
    return replace(job, responses=[replace(response, temperature=0.0) for response in job.responses])


def test_a_lost_shard_comes_back_byte_for_byte(stores, tmp_path: Path):
    """Without vLLM, whose engines make the same bytes in test_cluster."""
    recipe = copy_of(stores["transformers", "bf16"], tmp_path / "resumed")
    directory = recipe.states_dir("train")
    lost = directory / "shard-00001.safetensors"
    before, written_at = lost.read_bytes(), (directory / "shard-00000.safetensors").stat().st_mtime_ns
    lost.unlink()
    (directory / "manifest.json").unlink()
    half_written(directory / "shard-00001.safetensors")
    stage.harvest(recipe)
    assert lost.read_bytes() == before
    assert (directory / "shard-00000.safetensors").stat().st_mtime_ns == written_at
    assert not list(directory.glob(".*.tmp"))
    stage.harvest(recipe, run=never)  # complete: nothing to do


def test_states_that_do_not_lead_to_the_text_are_refused(harvested: Recipe, tmp_path: Path):
    recipe = copy_of(harvested, tmp_path / "wrong")
    (job,) = list_jobs(recipe, "validation")
    shard = Shard(job.path)
    shifted = [replace(shard[i], argmax=shard[i].argmax.roll(1)) for i in range(len(shard))]
    write_shard(job.path, shifted, num_target_layers=8)
    (recipe.states_dir("validation") / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="argmax"):
        stage.harvest(recipe)
    assert stage.argmax_agreement(list_jobs(harvested, "train")) is None  # sampled text proves nothing


@pytest.mark.parametrize("split", stage.SPLITS)
def test_fp8_rounds_the_aux_layers_and_nothing_else(stores, split):
    exact, rounded = (StateStore(stores["vllm", f].states_dir(split)) for f in ("bf16", "fp8"))
    assert Shard(shard_path(stores["vllm", "fp8"].states_dir(split), 0)).harvest["format"] == "fp8"
    for i in range(len(exact)):
        for name in ("input_ids", "loss_mask", "last_hidden", "argmax", "lse"):
            assert torch.equal(getattr(exact[i], name), getattr(rounded[i], name)), name
        for layer_id, rows in exact[i].aux.items():
            assert torch.equal(rounded[i].aux[layer_id], dequantise(*quantise(rows)))


def differences(ours: StateStore, theirs: StateStore) -> torch.Tensor:
    """Of the states of two stores of the same text: |a - b| / |b|, (sequences, layers)."""
    distances = []
    for i in range(len(ours)):
        left, right = ours[i], theirs[i]
        assert left.first_teacher_row == right.first_teacher_row > 0
        pairs = [(left.last_hidden, right.last_hidden), *((left.aux[t], right.aux[t]) for t in ours.aux_layer_ids)]
        distances.append([(a.float() - b.float()).norm() / b.float().norm() for a, b in pairs])
    return torch.tensor(distances)


@pytest.mark.parametrize("split", stage.SPLITS)
def test_both_backends_agree(stores, split):
    """bf16 rounding in another order, which sends a token here and there to another expert. States, sums of an
    embedding and of two parts of eight blocks, are apart by rounding in the median of the sequences; on greedy text
    log-sum-exps are within 5 % and nearly every argmax is equal.
    """
    ours, theirs = (StateStore(stores[b, "bf16"].states_dir(split)) for b in ("vllm", "transformers"))
    assert differences(ours, theirs).median(0).values.max() < rounding(torch.bfloat16, 1 + 2 * 8)
    for i in range(len(ours) if split == "validation" else 0):  # sampled text has places that no rounding leaves alone
        torch.testing.assert_close(ours[i].lse, theirs[i].lse, rtol=0.05, atol=0.2)
        assert (ours[i].argmax == theirs[i].argmax).float().mean() > 0.9


@pytest.mark.parametrize("number_format", ["bf16", "fp8"])
def test_the_dry_run_knows_the_bytes_and_verification_finds_them_whole(stores, number_format, capsys):
    recipe = stores["vllm", number_format]
    spec = load_target_spec(recipe.target_path)
    for split in ("train", "validation"):
        planned = states_bytes(recipe, spec, amount_of(recipe, split, Assumed()), split)
        paths = recipe.states_dir(split).glob("shard-*")
        assert sum(path.stat().st_size for path in paths) == pytest.approx(planned, rel=0.01)
        assert verify_store(recipe.states_dir(split)) == []
    assert stage.print_verification(recipe)


def test_a_second_harvester_of_a_spool_waits_for_the_validation_split_of_the_first(stores, tmp_path, monkeypatch):
    recipe = copy_of(stores["transformers", "bf16"], tmp_path / "online", spool_shards=2)
    shutil.rmtree(recipe.states_dir("train"))
    directory = recipe.states_dir("validation")
    finished = directory.rename(tmp_path / "finished")
    monkeypatch.setattr(stage, "backend", never)
    monkeypatch.setattr(stage, "_harvest_online", lambda recipe, spec: None)
    holding = f"from pathlib import Path; from drafthead.locks import acquire; acquire(Path({str(directory)!r}))"
    holder = start("-c", f"{holding}; print(flush=True); input()", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder as first, ThreadPoolExecutor() as pool:
        first.stdout.readline()
        second = pool.submit(stage.harvest, recipe)
        with pytest.raises(TimeoutError):
            second.result(timeout=2)
        shutil.copytree(finished, directory, dirs_exist_ok=True)
        first.communicate(b"\n")
        second.result(timeout=60)


def test_a_sequence_beyond_max_model_len_is_refused_before_an_engine_starts(tmp_path: Path, monkeypatch):
    recipe = small_recipe(tmp_path, "engine.max_model_len=100", "eval.max_tokens=32")
    for split in stage.SPLITS:
        responses = [artifacts.response("a", 60, 30, 9), artifacts.response("b", 60, 30, 10)]
        artifacts.write_response_artifact(recipe.responses_dir(split), responses)
        recipe.states_dir(split).mkdir(parents=True)
    monkeypatch.setattr(stage, "claim", lambda recipe, spec, split: False)
    with pytest.raises(ValueError, match=r"100 tokens.*engine\.max_model_len is 100; set it to 101"):
        stage.harvest(recipe, run=never)


def test_responses_are_required(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"data_gen/regenerate\.py"):
        stage.harvest(small_recipe(tmp_path))
