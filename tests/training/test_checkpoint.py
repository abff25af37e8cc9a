"""Old checkpoints go out of sight before they are deleted; ranks and starts of another run are refused."""

import shutil
from unittest.mock import Mock

import accelerate.utils
import pytest
import torch
from safetensors.torch import save_file

from drafthead.artifacts import ArtifactError
from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.training import checkpoint
from drafthead.training.accelerator import check_ranks


def state(step, best_step):
    return checkpoint.TrainState(step, 1, 1, 1.5, best_step, 1.5)


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_deletion_that_is_killed_leaves_no_damaged_checkpoint(tmp_path, monkeypatch):
    for step in (4, 8, 12, 16):
        folder = checkpoint.checkpoint_dir(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("rows")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.retain(tmp_path, 2, state(step=16, best_step=8))
    assert names(tmp_path) == [".step_00000004.old", "step_00000008", "step_00000012", "step_00000016"]
    checkpoint.remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step_00000008", "step_00000012", "step_00000016"]


def test_damaged_checkpoints_take_nobodys_place(tmp_path):
    """Of steps 4 to 16 only 8 verified: 12 and 16 are newer, yet nothing to go on from."""
    for step in (4, 8, 12, 16):
        checkpoint.checkpoint_dir(tmp_path, step).mkdir(parents=True)
    checkpoint.retain(tmp_path, 1, state(step=8, best_step=0))
    assert names(tmp_path) == ["step_00000008", "step_00000012", "step_00000016"]


def test_a_rank_of_another_recipe_is_named_with_its_host(monkeypatch):
    ranks = [("a", {"train": {"seed": 0}}), ("a", {"train": {"seed": 0}}), ("b", {"train": {"seed": 1}})]
    monkeypatch.setattr(accelerate.utils, "gather_object", lambda _: ranks)
    with pytest.raises(ArtifactError, match=r"rank 2 on b .* rank 0 on a:\n  train\.seed: found 1, wanted 0\n"):
        check_ranks({})
    ranks.pop()
    check_ranks({})


def test_a_run_does_not_go_on_with_rows_for_other_tokens(tmp_path):
    vocabulary = DraftVocabulary(torch.tensor([0, 0, 1]), torch.tensor([True, True, False, True]))
    save_file({"d2t": vocabulary.d2t}, tmp_path / checkpoint.MODEL_FILE)
    checkpoint.check_vocabulary(tmp_path, vocabulary)
    other = DraftVocabulary(torch.tensor([0, 1, 1]), torch.tensor([True, False, True, True]))
    with pytest.raises(ArtifactError, match="draft vocabulary"):
        checkpoint.check_vocabulary(tmp_path, other)
