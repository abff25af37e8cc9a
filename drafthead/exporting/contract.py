"""What vLLM reads of an EAGLE-3 head: the one place for its tensor names and config keys.

Checked against vLLM 0.32. Every key whose default differs between formats or model runners is written
explicitly; aux layer ids stand in all three places where a runner may look for them.
"""

import torch
from torch import Tensor

from drafthead.drafters.base import DraftShape
from drafthead.drafters.eagle3.model import DraftModel
from drafthead.exporting.fp8 import dequantised, quantisation_config, quantised

MAPS = ("d2t", "t2d")
# The first layer's name in a checkpoint and in each format; vLLM reads both, other tools their own.
FIRST_LAYER = "midlayer."
_FIRST_LAYER_IN = {"vllm": FIRST_LAYER, "speculators": "layers.0."}
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def head_config(shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str, max_position_embeddings: int) -> dict:
    """config.json of an exported head.

    Args:
        shape: of the trained head.
        aux_layer_ids: ascending boundary indices.
        dtype: `export.dtype`.
        max_position_embeddings: at least the serving length; a smaller value makes vLLM stop drafting
            for the whole batch once one request passes it.
    """
    head = shape.head
    layers = list(aux_layer_ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16" if dtype == "fp8" else dtype,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_hidden_layers": head.num_layers,
        "num_attention_heads": head.num_attention_heads,
        "num_key_value_heads": head.num_key_value_heads,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": shape.rope_parameters,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "num_aux_hidden_states": shape.num_aux_layers,
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layers,
            "use_aux_hidden_state": True,
            "norm_before_fc": head.norm_before_fc,
        },
        "bos_token_id": None,
        "eos_token_id": None,
        **({"quantization_config": quantisation_config()} if dtype == "fp8" else {}),
    }


def expected_shapes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint; the exported file's, maps aside (see `has_maps`)."""
    with torch.device("meta"):
        model = DraftModel(shape)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    return {**shapes, "d2t": (shape.head.draft_vocab_size,), "t2d": (shape.vocab_size,)}


def has_maps(shape: DraftShape) -> bool:
    """Whether the exported file holds d2t and t2d: with the target's whole vocabulary vLLM refuses them."""
    return shape.head.draft_vocab_size != shape.vocab_size


def exported_tensors(
    tensors: dict[str, Tensor], shape: DraftShape, dtype: str, layout: str = "vllm"
) -> dict[str, Tensor]:
    """A checkpoint's tensors as a file in `export.dtype` holds them, with maps only where they map anything."""
    first = _FIRST_LAYER_IN[layout]
    kept = {name: tensor for name, tensor in tensors.items() if has_maps(shape) or name not in MAPS}
    return {name.replace(FIRST_LAYER, first): tensor for name, tensor in _cast(kept, dtype).items()}


def as_served(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """A checkpoint's tensors with the values that the file in `export.dtype` holds, as float32."""
    written = dequantised(_cast(tensors, dtype))
    return {name: t.float() if t.is_floating_point() else t for name, t in written.items()}


def _cast(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    if dtype == "fp8":
        return quantised(tensors)
    return {name: t.to(_DTYPES[dtype]) if t.is_floating_point() else t for name, t in tensors.items()}


def checkpoint_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """An exported file's tensors, of any layout, under the names of a checkpoint, fp8 weights multiplied out."""
    named = {name.replace(_FIRST_LAYER_IN["speculators"], FIRST_LAYER): tensor for name, tensor in tensors.items()}
    return dequantised(named)


def check_tensors(tensors: dict[str, Tensor], shape: DraftShape) -> None:
    """Compare a head's tensors with the contract.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape, not finite, or d2t and t2d disagree.
    """
    wanted = expected_shapes(shape)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"{name}: missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name}: not part of a head" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{name}: shape {found[name]}, expected {wanted[name]}"
        for name in sorted(wanted.keys() & found.keys())
        if found[name] != wanted[name]
    ]
    problems += [
        f"{name}: has values that are not finite"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if not problems:
        problems += _vocabulary_problems(tensors["d2t"], tensors["t2d"])
    if problems:
        raise ValueError("the checkpoint does not fit the recipe's head:\n  " + "\n  ".join(problems))


def _vocabulary_problems(d2t: Tensor, t2d: Tensor) -> list[str]:
    ids = (d2t + d2t.new_tensor(range(len(d2t)))).tolist()
    if ids != t2d.nonzero()[:, 0].tolist():
        return [f"d2t maps to {len(set(ids))} target tokens, which are not the {int(t2d.sum())} marked in t2d"]
    return []
