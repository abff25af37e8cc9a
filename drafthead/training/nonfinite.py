"""Stop at a loss or gradient that is not finite, before it reaches the weights, and keep what shows why.

    runs/NAME/nonfinite/step_00000050/
        model.safetensors   the weights that met the step, float32
        record.json         step, sequences, losses per TTT step, whether the stored states were finite

DeepSpeed leaves the weights alone when the gradient norm is not finite, except at ZeRO 0, where a hook of
training.optimizer does. So the weights saved here are those of the last good step.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafthead.data.packing import PackedBatch
from drafthead.data.windows import Window
from drafthead.files import atomic_path, write_json
from drafthead.losses.fused import HeadLoss
from drafthead.training.run import Run
from drafthead.training.weights import consolidated


def stop_unless_finite_loss(run: Run, step: int, batch: PackedBatch, scored: HeadLoss) -> None:
    """Every rank calls this after each micro batch; all stop when one of them must.

    Raises:
        FloatingPointError: names the step, the losses and the saved state.
    """
    bad = torch.zeros((), device=scored.loss.device) + ~torch.isfinite(scored.loss.detach())
    if not run.accelerator.reduce(bad, "sum").item():
        return
    from accelerate.utils import gather_object

    finite = {name: bool(torch.isfinite(getattr(batch, name)).all()) for name in ("aux", "last_hidden")}
    mine = {"ids": batch.ids, "loss_per_step": [str(v) for v in scored.position_sums.tolist()], "inputs_finite": finite}
    batches = [b for b in gather_object([mine if bad.item() else None]) if b is not None]
    folder = _save(run, step, {"what": "loss", "batches": batches})
    raise FloatingPointError(
        f"the loss at step {step + 1} is not finite ({len(batches)} micro batches; stored states finite: "
        f"{[b['inputs_finite'] for b in batches]}). Nothing was updated; weights and sequences are in {folder}. "
        "Harvest those sequences again if their states are not finite, else lower train.learning_rate"
    )


def stop_unless_finite_gradient(run: Run, step: int, group: list[list[Window]], grad_norm: float) -> None:
    """Every rank calls this after the optimiser's step with the norm that all of them see.

    Raises:
        FloatingPointError: names the step and the saved state.
    """
    if math.isfinite(grad_norm):
        return
    ids = sorted({run.inputs.train[window.document].id for windows in group for window in windows})
    folder = _save(run, step, {"what": "gradient", "batches": [{"ids": ids}]})
    raise FloatingPointError(
        f"gradient norm {grad_norm} at step {step + 1} with finite losses. Nothing was updated; weights and "
        f"sequences are in {folder}. Lower train.learning_rate"
    )


def _save(run: Run, step: int, record: dict[str, Any]) -> Path:
    folder = run.recipe.run_dir / "nonfinite" / f"step_{step + 1:08d}"
    weights = consolidated(run)
    if run.accelerator.is_main_process:
        with atomic_path(folder / "model.safetensors") as temporary:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary)
        write_json(folder / "record.json", {"step": step + 1, **record})
    run.accelerator.wait_for_everyone()
    return folder
