"""The embedded target in MXFP4, read back by transformers."""

import torch
from transformers import AutoModelForCausalLM

from tools.tiny.mxfp4 import TARGET, quantise, write_mxfp4


def test_values_that_e2m1_has_come_back_exactly():
    """A block of them, and one of half their size: the second scale is one less."""
    row = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0] * 2)
    blocks, scales = quantise(torch.cat([row, row / 2]).view(1, 64, 1))
    assert scales.tolist() == [[[127, 126]]]
    assert torch.equal(blocks[0, 0, 0], blocks[0, 0, 1])
    assert blocks[0, 0, 0, :4].tolist() == [0x10, 0x32, 0x54, 0x76]


def test_transformers_reads_the_weights_that_were_written(tmp_path):
    write_mxfp4(tmp_path)
    exact = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)  # dequantised on a CPU
    for expected, found in zip(exact.model.layers, rounded.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            a, b = (getattr(layer.mlp.experts, name).float() for layer in (expected, found))
            assert a.shape == b.shape
            assert 0.02 < (a - b).detach().norm() / a.detach().norm() < 0.15
        assert torch.equal(expected.self_attn.q_proj.weight, found.self_attn.q_proj.weight)
