"""The experts of a gpt-oss target in MXFP4, as openai/gpt-oss-20b and -120b store them: a small file of that kind.

    python -m tools.tiny.mxfp4 DIRECTORY      # of the embedded target

32 neighbouring values of a row share a scale, a power of two in eight bits; each is one of sixteen e2m1 values in four
(OCP Microscaling Formats 1.0). E experts, O outputs, I inputs.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.config import REPO_ROOT

TARGET = REPO_ROOT / "data_gen" / "tiny" / "target"
_POSITIVE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # e2m1; the sign is the fourth bit
_BLOCK, _BIAS, _LARGEST_EXPONENT = 32, 127, 2
# What gpt-oss leaves in bf16.
_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(E, I, O) of transformers -> blocks (E, O, I / 32, 16) and scales (E, O, I / 32), uint8, the first value in the
    low half of a byte."""
    values = weight.float().transpose(1, 2).unflatten(-1, (-1, _BLOCK))  # (E, O, I / 32, 32)
    largest = values.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    exponent = largest.log2().floor() - _LARGEST_EXPONENT
    scaled = values / exponent.exp2()
    codes = (scaled.abs()[..., None] - _POSITIVE).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low + 16 * high).to(torch.uint8), (exponent[..., 0] + _BIAS).to(torch.uint8)


def write_mxfp4(directory: Path) -> None:
    """Copy the embedded target, its experts' matrices in MXFP4."""
    shutil.copytree(TARGET, directory, dirs_exist_ok=True)
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantise(tensors.pop(name))
        save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": _CONFIG}, indent=2))


if __name__ == "__main__":
    write_mxfp4(Path(sys.argv[1]))
