"""A checkpoint of another number of ranks: its optimiser states lie where their parameters do."""

from types import SimpleNamespace

import pytest
import torch

from drafthead.training import checkpoint
from drafthead.training.checkpoint import TrainState


@pytest.mark.parametrize("written_by", [1, 2])
def test_states_that_deepspeed_reads_to_the_cpu_follow_their_parameter(tmp_path, monkeypatch, written_by):
    """A parameter on "meta" stands for one on a GPU: whatever stays on the CPU shows."""
    weight = torch.nn.Parameter(torch.empty(4, device="meta"))
    optimizer = torch.optim.AdamW([weight], fused=False)

    def load_checkpoint(folder: str, tag: str) -> tuple[str, dict]:
        step = torch.tensor(4.0, device="cpu" if tag == "universal" else "meta")  # as torch's own loading leaves it
        optimizer.state[weight] = {"step": step, "exp_avg": torch.empty(4, device="meta"), "other": 1}
        return folder, {}

    def convert(source, destination) -> None:
        destination.mkdir(parents=True)

    monkeypatch.setattr(checkpoint, "_convert", convert)
    engine = SimpleNamespace(
        _config=SimpleNamespace(), optimizer=SimpleNamespace(optimizer=optimizer), global_steps=4,
        load_checkpoint=load_checkpoint,
    )  # fmt: skip
    accelerator = SimpleNamespace(num_processes=1, is_main_process=True, wait_for_everyone=lambda: None)
    state = TrainState(4, written_by, 1, 0.0, 0, 0.0)
    checkpoint.load(accelerator, engine, tmp_path / "step_00000004", state)
    assert {t.device for t in optimizer.state[weight].values() if isinstance(t, torch.Tensor)} == {weight.device}
