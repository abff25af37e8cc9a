"""Draft weights in fp8: what is written, what comes back, and that vLLM's own fp8 layers compute with it."""

import pytest
import torch
from safetensors.torch import load_file

from drafthead.drafters.fp8 import FP8, as_served, cast, dequantised
from drafthead.drafters.vllm import check_config
from drafthead.exporting.export import export_head
from drafthead.exporting.importing import import_head
from tests.damage import replace_tensors
from tests.exporting.runs import bare_copy, config_of, random_weights, recipe_at, shape_of, write_run
from tests.exporting.vllm_model import TOKENS, VllmDraft, one_rank, our_logits, two_steps

PROJECTIONS = {
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_projections_are_fp8_and_the_rest_is_not(tmp_path, layout):
    recipe = recipe_at(tmp_path, "export.dtype=fp8", f"export.format={layout}")
    write_run(recipe)
    tensors = load_file(export_head(recipe, serve_check=False) / "model.safetensors")
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    assert {name for name, tensor in tensors.items() if tensor.dtype == FP8} == PROJECTIONS
    for name in PROJECTIONS:
        assert tensors[name + "_scale"].shape == (tensors[name].shape[0], 1)
    bf16 = {name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    assert {"fc.weight", "lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight"} <= bf16


def test_an_error_is_at_most_half_a_step_of_the_channel():
    sizes = torch.tensor([[1e-3], [1], [50], [7], [0]])
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * sizes
    name = "midlayer.mlp.up_proj.weight"
    back = dequantised(cast({name: weight}, "fp8"))[name]
    # e4m3 has 3 bits of mantissa; below 2^-6 of the scale its steps are 2^-9 of it.
    step = torch.maximum(weight.abs() / 16, weight.abs().amax(1, keepdim=True) / 448 * 2**-10)
    assert ((back - weight).abs() <= step * (1 + 1e-6)).all()
    assert (back[1] != weight[1]).any()


def test_a_scale_that_is_missing_is_named():
    name = "midlayer.mlp.up_proj.weight"
    tensors = cast({name: torch.ones(4, 8)}, "fp8")
    with pytest.raises(ValueError, match=rf"{name}_scale of shape \(4, 1\).*none"):
        dequantised({name: tensors[name]})
    with pytest.raises(ValueError, match=r"\(3, 1\)"):
        dequantised({**tensors, name + "_scale": torch.ones(3, 1)})


def test_a_config_that_states_other_weights_is_refused(tmp_path):
    plain, fp8 = (recipe_at(tmp_path, f"export.dtype={dtype}") for dtype in ("bfloat16", "fp8"))
    shape, layer_ids = shape_of(fp8), fp8.target.aux_layer_ids
    check_config(config_of(fp8), shape, layer_ids, 1024, "fp8")
    with pytest.raises(ValueError, match="quant_method: found 'compressed-tensors', wanted None"):
        check_config(config_of(fp8), shape, layer_ids, 1024)
    with pytest.raises(ValueError, match="quant_method: found None, wanted 'compressed-tensors'"):
        check_config(config_of(plain), shape, layer_ids, 1024, "fp8")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_vllm_computes_with_the_fp8_weights(tmp_path, layout):
    """Its fp8 layers against our float32 products of the same weights: what is left is the rounding of activations."""
    recipe = recipe_at(tmp_path, "export.dtype=fp8", f"export.format={layout}", "head.num_layers=2")
    shape = shape_of(recipe)
    weights = random_weights(shape)
    write_run(recipe, weights)
    head = export_head(recipe, serve_check=False)
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(TOKENS, 3 * shape.hidden_size, generator=generator)
    embeddings = torch.randn(TOKENS + 1, shape.hidden_size, generator=generator)
    with one_rank():
        draft = VllmDraft(recipe, head)
        assert draft.config.speculative_config.draft_model_config.quantization == "compressed-tensors"
        model = draft.load(head)
        stored = {name for name, tensor in model.named_parameters() if tensor.dtype == FP8}
        theirs = two_steps(draft, model, aux, embeddings)
    fused = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert stored == {f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in fused}
    written, trained = (our_logits(shape, t, aux, embeddings) for t in (as_served(weights, "fp8"), weights))
    for found, wanted, other in zip(theirs, written, trained, strict=True):
        found, wanted, other = (logits[..., weights["t2d"]] for logits in (found, wanted, other))
        assert (found - wanted).square().mean().sqrt() < 0.05 * wanted.std()
        assert not torch.allclose(wanted, other, atol=1e-4), "these weights would be the same in any format"


def test_an_fp8_scale_in_a_foreign_file_is_read_per_matrix_too(tmp_path):
    """Some publishers write one number per matrix."""
    recipe = recipe_at(tmp_path / "first", "export.dtype=fp8")
    write_run(recipe)
    exported = export_head(recipe, serve_check=False)
    public, name = bare_copy(exported, tmp_path / "public"), "midlayer.mlp.up_proj.weight"
    replace_tensors(public / "model.safetensors", {name + "_scale": torch.tensor([0.5])})
    run = import_head(recipe_at(tmp_path / "second"), str(public))
    found = load_file(run / "checkpoints/step_00000000/model.safetensors")
    written = load_file(exported / "model.safetensors")[name]
    assert torch.equal(found[name], written.float() * 0.5)
