"""What nothing reads or fp8 rounds: rows of prompts and last tokens without a trace, states in fp8 with a small one."""

import pytest
import torch

from drafthead import artifacts
from drafthead.artifacts import ArtifactError
from drafthead.data.shard import Shard, first_teacher_row, shard_path, write_shard
from drafthead.training.inputs import open_inputs
from tests.data.sequences import as_harvested
from tests.faults.payload import TIMES
from tests.training import launching
from tests.training.synthetic import small_recipe, synthetic_stores


def rewrite(recipe, as_stored: bool) -> None:
    """Both splits with texts that end as a target's do, under the same manifest but for the files' checksums.

    Args:
        recipe: whose stores are rewritten.
        as_stored: without teacher rows of prompts, as a harvest stores them, and with noise for states of the last
            token, which states captured while generating do not have.
    """
    noise = torch.Generator().manual_seed(0)
    for split in ("train", "validation"):
        directory = recipe.states_dir(split)
        path = shard_path(directory, 0)
        full = [Shard(path)[i] for i in range(len(Shard(path)))]
        size = path.stat().st_size
        kept = []
        for s in full:
            # Training texts end with the response, validation texts K = 3 tokens after it.
            s.loss_mask[4:] = 1
            if split == "validation":
                s.loss_mask[-3:] = 0
            if as_stored:
                assert first_teacher_row(s.loss_mask) > 0
                for rows in (*s.aux.values(), s.last_hidden, s.lse):
                    rows[-1] = 50 * torch.randn(rows[-1].shape, generator=noise)
                s.argmax[-1] = 7
            kept.append(as_harvested(s) if as_stored else s)
        write_shard(path, kept, num_target_layers=8)
        assert (path.stat().st_size < size) == as_stored
        artifacts.finish(directory, {"sequences": len(kept)})


@pytest.mark.slow
def test_losses_are_the_same_to_the_last_bit_without_the_rows_that_nothing_reads(tmp_path):
    entries = []
    for name in ("full", "tail"):
        recipe = small_recipe(tmp_path / name)
        synthetic_stores(recipe, 24, 4)
        rewrite(recipe, as_stored=name == "tail")
        launching.run(recipe)
        steps = launching.entries(recipe.run_dir) + launching.entries(recipe.run_dir, "validation")
        for entry in steps:
            for timing in TIMES["metrics.jsonl"]:
                entry.pop(timing, None)
        entries.append(steps)
    assert len(entries[0]) > 4
    assert entries[0] == entries[1]


def test_a_store_of_another_format_is_refused(tmp_path):
    recipe = small_recipe(tmp_path)
    synthetic_stores(recipe, 2, 2)
    with pytest.raises(ArtifactError, match=r"format: found 'bf16', wanted 'fp8'"):
        open_inputs(small_recipe(tmp_path, "states.format=fp8"))
    assert open_inputs(recipe).train[0].aux[2].dtype == torch.bfloat16
