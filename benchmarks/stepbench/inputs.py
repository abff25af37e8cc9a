"""The tensors that every contestant reads: random, but shaped so that the losses can be compared.

Rows of the target's lm_head outside the draft vocabulary are small, so the target's first choice is always
a draft token: SpecForge drops other positions from its loss. The target's logits have a standard deviation
of about 2, so that the loss is well away from the entropy of the target. A directory in Hugging Face
layout stands beside the tensors, since both peers load the target from one.

Shapes: as in `shapes`, L = B x T tokens.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from stepbench.shapes import Shape

ROPE_THETA = 10000.0
MASK = 0  # the mask token of parallel drafters


def target_config(shape: Shape) -> dict:
    """A Llama configuration of the target's width, in transformers' terms."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": 6, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps, "max_position_embeddings": 2 * shape.tokens, "hidden_act": "silu",
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False, "mlp_bias": False, "pad_token_id": None,
    }  # fmt: skip


def write_inputs(shape: Shape, directory: Path, seed: int = 0) -> None:
    """Write `tensors.safetensors` (batch and draft weights) and `target/`."""
    draw = torch.Generator().manual_seed(seed)
    V, D, H = shape.vocab, shape.draft_vocab, shape.hidden
    dtype = getattr(torch, shape.dtype)
    target_ids = torch.randperm(V, generator=draw)[:D].sort().values
    lm_head = 0.05 * torch.randn(V, H, generator=draw) / H**0.5
    lm_head[target_ids] *= 40.0
    states = torch.randn(shape.batch, shape.tokens, H, generator=draw)
    tensors = {
        "input_ids": torch.randint(0, V, (shape.batch, shape.tokens), generator=draw),  # (B, T)
        "aux": torch.randn(shape.batch, shape.tokens, shape.layers * H, generator=draw).to(dtype),  # (B, T, N * H)
        "last_hidden": states.to(dtype),  # (B, T, H), input of the target's final norm
        "loss_mask": torch.ones(shape.batch, shape.tokens, dtype=torch.long),
        "target_ids": target_ids,
        "lm_head": lm_head.to(dtype),
        "embeddings": torch.randn(V, H, generator=draw).to(dtype),
        "final_norm": torch.ones(H, dtype=dtype),
        **{f"draft.{name}": value.to(dtype) for name, value in draft_weights(shape, draw).items()},
    }
    tensors["lse"], tensors["argmax"] = _target_statistics(tensors["last_hidden"], tensors["lm_head"], shape.eps)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "tensors.safetensors")
    write_target(directory / "target", shape, tensors)


def draft_weights(shape: Shape, draw: torch.Generator) -> dict[str, Tensor]:
    """The head's matrices under the names of an exported EAGLE-3 file; norms start at one."""
    H, F, d = shape.hidden, shape.intermediate, shape.head_dim
    sizes = {
        "fc.weight": (H, shape.layers * H),
        "midlayer.self_attn.q_proj.weight": (shape.heads * d, 2 * H),
        "midlayer.self_attn.k_proj.weight": (shape.kv_heads * d, 2 * H),
        "midlayer.self_attn.v_proj.weight": (shape.kv_heads * d, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, shape.heads * d),
        "midlayer.mlp.gate_proj.weight": (F, H),
        "midlayer.mlp.up_proj.weight": (F, H),
        "midlayer.mlp.down_proj.weight": (H, F),
        "lm_head.weight": (shape.draft_vocab, H),
    }
    return {name: torch.randn(size, generator=draw) / size[1] ** 0.5 for name, size in sizes.items()}


def normed(states: Tensor, eps: float, weight: Tensor | float = 1.0) -> Tensor:
    """The target's final norm; of random targets its weight is one."""
    wide = states.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(states.dtype)


def _target_statistics(states: Tensor, lm_head: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and argmax of the target's logits, each (B, T), as the harvest stores them."""
    rows = normed(states, eps).flatten(0, 1).float().split(256)
    pieces = [(logits.logsumexp(-1), logits.argmax(-1)) for logits in (r @ lm_head.float().T for r in rows)]
    lse, argmax = (torch.cat(part).view(states.shape[:2]) for part in zip(*pieces, strict=True))
    return lse, argmax


def write_target(directory: Path, shape: Shape, tensors: dict[str, Tensor]) -> None:
    """A target of this shape as both peers load it, of which they need embeddings, final norm and head."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(target_config(shape), indent=2) + "\n")
    weights = {
        "model.embed_tokens.weight": tensors["embeddings"],
        "model.norm.weight": tensors["final_norm"],
        "lm_head.weight": tensors["lm_head"],
    }
    save_file(weights, directory / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
