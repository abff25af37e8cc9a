"""How large a target is, from its config.json alone: weights, what a token multiplies and leaves in the cache.

The model is built on meta tensors, so nothing is allocated and no weights need be there. Where they are, their files
say how many bytes they take. Left out: what an engine adds for its activations and graphs.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch

from drafthead.target.files import local_files

_EXPERTS = ".experts."
_MXFP4_BYTES = 17 / 32  # 32 values of 4 bits share a scale of 8
_CACHE_BYTES = 2  # of a key or value: engines cache in bf16 unless told otherwise


@dataclass(frozen=True)
class TargetSize:
    """Sizes of a target.

    Attributes:
        parameters: all of them.
        active: those that one token multiplies: of the experts only the chosen ones.
        weight_bytes: of all weights, as stored.
        expert_bytes: of the experts among them.
        expert_share: of the experts that one token uses; 1 for a dense model.
        layers: L.
        windowed_layers: of them with a sliding window.
        window: its length in tokens; 0 without one.
        layer_token_bytes: keys and values of one token in one layer.
        quantisation: quant_method of config.json, if any.
        counted_unquantised: whether that method is not known here, so that weight_bytes is an upper bound.
    """

    parameters: int
    active: int
    weight_bytes: int
    expert_bytes: int
    expert_share: float
    layers: int
    windowed_layers: int
    window: int
    layer_token_bytes: int
    quantisation: str | None
    counted_unquantised: bool

    def cache_bytes(self, tokens: float) -> int:
        """Keys and values of a sequence; a layer with a window keeps no more than that."""
        whole = self.layers - self.windowed_layers
        kept = whole * tokens + self.windowed_layers * min(tokens, self.window)
        return int(kept * self.layer_token_bytes)

    def read_bytes(self, batch: int) -> float:
        """Weights that a step over `batch` tokens reads: of the experts those that any of them chose."""
        chosen = 1 - (1 - self.expert_share) ** batch
        return self.weight_bytes - self.expert_bytes * (1 - chosen)


def target_size(path: str, revision: str | None = None, trust_remote_code: bool = False) -> TargetSize:
    """Read config.json and size the model that it describes.

    Raises:
        FileNotFoundError: there is no config.json here, and none can be downloaded; the message has the command.
        ValueError: transformers has no causal language model for it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = local_files(path, revision, ("config.json",))
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code).get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ValueError(
            f"target {path} cannot be sized: transformers builds no language model of it ({error})"
        ) from error
    method = (written.get("quantization_config") or {}).get("quant_method")
    counts = {name: p.numel() for name, p in model.named_parameters()}
    widths = {name: _width(name, p.dim(), method) for name, p in model.named_parameters()}
    experts = [name for name in counts if _EXPERTS in name]
    share = _expert_share(config) if experts else 1.0
    total, in_experts = sum(counts.values()), sum(counts[name] for name in experts)
    weight_bytes = sum(counts[name] * widths[name] for name in counts)
    kinds = getattr(config, "layer_types", None) or []
    windowed = sum(kind == "sliding_attention" for kind in kinds)
    return TargetSize(
        parameters=total,
        active=round(total - in_experts * (1 - share)),
        weight_bytes=int(weight_bytes),
        expert_bytes=int(sum(counts[name] * widths[name] for name in experts)),
        expert_share=share,
        layers=config.num_hidden_layers,
        windowed_layers=windowed,
        window=(getattr(config, "sliding_window", None) or 0) if windowed else 0,
        layer_token_bytes=2 * config.num_key_value_heads * _head_dim(config) * _CACHE_BYTES,
        quantisation=method,
        counted_unquantised=method not in (None, "mxfp4", "fp8"),
    )


def _width(name: str, dimensions: int, method: str | None) -> float:
    """Bytes per weight: MXFP4 packs experts; fp8 packs matrices but embeddings and lm_head; the rest is bf16."""
    if method == "mxfp4" and _EXPERTS in name and not name.endswith("bias"):
        return _MXFP4_BYTES
    if method == "fp8" and dimensions > 1 and "embed" not in name and "lm_head" not in name:
        return 1
    return 2


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _expert_share(config: Any) -> float:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / experts if experts and chosen else 1.0
