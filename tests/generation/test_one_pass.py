"""Responses and states in one pass: what two passes make of the same prompts, also after a kill."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from drafthead.artifacts import ArtifactError, read_json
from drafthead.config import Recipe
from drafthead.data.responses import SPLITS, read_left_out
from drafthead.data.store import StateStore, verify_store
from drafthead.generation import regenerate as stage
from drafthead.generation.harvest import harvest
from drafthead.generation.prompts import make_prompts
from drafthead.generation.shards import captured_dir, claim_captured
from drafthead.target.spec import load_target_spec
from tests.artifacts import read_responses
from tests.generation.chats import chat_recipe
from tests.generation.small import SMALL, never
from tests.scripts import start, wait_for

pytestmark = pytest.mark.slow


class Passes(NamedTuple):
    """The same prompts, generated and harvested in one pass and in two."""

    one: Recipe
    two: Recipe


def with_one_pass(recipe: Recipe, folder: Path, **states: object) -> Recipe:
    """The same recipe in one pass, over a copy of its prompts."""
    shutil.copytree(recipe.prompts_dir, folder / "data" / recipe.name / "prompts")
    return recipe.model_copy(update={"output_dir": str(folder)}).changed("states", one_pass=True, **states)


def _spec(recipe: Recipe):
    return load_target_spec(recipe.target_path)


@pytest.fixture(scope="module")
def passes(harvested: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Passes]]:
    """Single turns, and chats whose cut responses are dropped and whose store lies on another disk.

    Chats in float32: in bf16 another batch may send a token to other experts, and its row is another one.
    """
    folder = tmp_path_factory.mktemp("one-pass")
    options = (
        "responses.max_tokens=80", "responses.drop=[truncated]", "target.dtype=float32", "states.prompt_loss=0.5",
    )  # fmt: skip
    chats = chat_recipe(folder, *options, "name=chats")
    make_prompts(chats)
    found = {
        "single": Passes(with_one_pass(harvested, folder / "one"), harvested),
        "chats": Passes(with_one_pass(chats, folder / "one"), chats),
    }
    elsewhere, states = tempfile.TemporaryDirectory(dir="/dev/shm"), found["chats"].one.states_dir("train").parent
    states.parent.mkdir(parents=True, exist_ok=True)
    states.symlink_to(elsewhere.name)
    stage.regenerate(chats)
    for each in found.values():
        stage.regenerate(each.one)
        harvest(each.one, run=never)
    harvest(chats)
    yield found
    elsewhere.cleanup()


def assert_same_states(one: Recipe, two: Recipe, split: str) -> None:
    """Every row that training reads: all but the one of the last token."""
    left, right = StateStore(one.states_dir(split)), StateStore(two.states_dir(split))
    assert left.ids == right.ids
    for i in range(len(left)):
        found, wanted = left[i], right[i]
        assert found.input_ids.tolist() == wanted.input_ids.tolist()
        assert found.loss_mask.tolist() == wanted.loss_mask.tolist()
        assert found.first_teacher_row == wanted.first_teacher_row
        for layer_id, rows in wanted.aux.items():
            difference = (found.aux[layer_id] - rows)[:-1].float().norm(dim=1)
            assert (difference < 0.05 * rows[:-1].float().norm(dim=1)).all()
        response = slice(len(found.lse) - int(found.loss_mask.flip(0).long().argmax()))  # not the text past its stop
        torch.testing.assert_close(found.lse[response][:-1], wanted.lse[response][:-1], rtol=0, atol=0.1)
        torch.testing.assert_close(found.lse[:-1], wanted.lse[:-1], rtol=0.01, atol=0.1)
        assert (found.argmax[:-1] == wanted.argmax[:-1]).float().mean() > 0.95


@pytest.mark.parametrize("kind", ["single", "chats"])
def test_one_pass_makes_what_two_make(passes: dict[str, Passes], kind: str):
    one, two = passes[kind]
    temperatures = set()
    assert kind == "single" or any(entry.flags for entry in read_left_out(one.responses_dir("train"))), "none dropped"
    for split in SPLITS:
        # Token for token at any temperature: the plain sampler draws, from the seed of the request.
        assert read_responses(one.responses_dir(split)) == read_responses(two.responses_dir(split))
        assert read_left_out(one.responses_dir(split)) == read_left_out(two.responses_dir(split))
        temperatures |= {response.temperature for response in read_responses(one.responses_dir(split))}
        assert_same_states(one, two, split)
        assert verify_store(one.states_dir(split)) == []
        assert not captured_dir(one, split).exists()
        counts = [read_json(r.states_dir(split) / "manifest.json")["counts"] for r in (one, two)]
        assert all(counts[0][name] == counts[1][name] for name in ("sequences", "tokens", "loss_tokens"))
        store = StateStore(one.states_dir(split))
        masks = [int(store.tokens(i)[1].max()) for i in range(len(store))]  # of prompts of first turns 2
        turns = [response.turn for response in read_responses(one.responses_dir(split))]
        assert masks == [2 if kind == "chats" and split == "train" and turn == 0 else 1 for turn in turns]
    assert temperatures == ({0.0, 0.7} if kind == "single" else {0.0})


def test_states_of_another_kind_are_not_mixed_in(passes: dict[str, Passes], tmp_path: Path):
    one = with_one_pass(passes["single"].two, tmp_path)
    claim_captured(one, _spec(one), "train")
    with pytest.raises(ArtifactError, match=r"aux_layer_ids.*\[2, 4, 6\].*\[1, 2, 3\]"):
        claim_captured(one.changed("target", aux_layer_ids=(1, 2, 3)), _spec(one), "train")
    with pytest.raises(ArtifactError, match="one_pass"):
        harvest(passes["single"].one.model_copy(update={"states": passes["single"].two.states}))


@pytest.mark.soak
def test_a_killed_pass_is_resumed(passes: dict[str, Passes], tmp_path: Path):
    two = passes["single"].two
    one = with_one_pass(two, tmp_path, sequences_per_shard=2)
    options = (f"output_dir={tmp_path}", *SMALL, "states.sequences_per_shard=2", "states.one_pass=true")
    with (tmp_path / "log").open("w") as log:
        process = start("data_gen/regenerate.py", *options, stdout=log, stderr=log)
    staged = captured_dir(one, "train") / "part-00000"
    wait_for(lambda: list(staged.glob("shard-*")), tmp_path / "log", process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    captured = sorted(staged.glob("shard-*"))
    assert not (one.responses_dir("train") / "manifest.json").exists(), "it was to die in the middle"
    assert captured
    kept = captured[0].read_bytes()
    for shard in captured[1:]:
        shard.unlink()  # as if it had died on its way to disk
    stage.regenerate(one)
    harvest(one)
    for split in SPLITS:
        assert read_responses(one.responses_dir(split)) == read_responses(two.responses_dir(split))
        assert_same_states(one, two, split)
        assert verify_store(one.states_dir(split)) == []
    assert (one.states_dir("train") / "shard-00000.safetensors").read_bytes() == kept
    last_rows = [StateStore(one.states_dir("train"))[i].aux[2][-1] for i in range(4)]
    assert [bool(row.any()) for row in last_rows] == [False, False, True, True]  # captured, harvested afterwards
