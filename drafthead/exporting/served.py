"""How an engine reads a head's config.json, compared with how the head was trained.

Most keys that decide what a head computes leave no trace in the shapes of its tensors: a head trained without
`norm_before_residual` and served with it loads without a word and drafts garbage. So config.json is read back by
vLLM 0.32's rules, defaults and precedence included, and compared value by value.
"""

from typing import Any

from drafthead.drafters.base import DraftShape
from drafthead.exporting.fp8 import METHOD
from drafthead.exporting.speculators import from_speculators, is_speculators
from drafthead.target.rope import rope_parameters_of

TARGET_DEFAULT = "the target's default"


def trained_values(shape: DraftShape, aux_layer_ids: tuple[int, ...]) -> dict[str, Any]:
    """What decides the head's arithmetic, by the names of `served_values`."""
    head = shape.head
    return {
        "aux layers (model runner V1)": list(aux_layer_ids),
        "aux layers (model runner V2)": list(aux_layer_ids),
        "aux layers that fc is sized for": shape.num_aux_layers,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "num_hidden_layers": head.num_layers,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_attention_heads": head.num_attention_heads,
        "num_key_value_heads": head.num_key_value_heads,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        **_rope({"rope_parameters": shape.rope_parameters}),
    }


def served_values(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM makes of an EAGLE-3 config.json, plain or of the speculators layout.

    The aux layer ids are looked up in several places: runner V1 takes the top-level list, then the nested one; V2 the
    top-level list only; fc is sized by the count, else by the nested list, else for three.
    """
    config = from_speculators(config) if is_speculators(config) else config
    nested = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    nested_ids = nested.get("eagle_aux_hidden_state_layer_ids")
    heads = config["num_attention_heads"]
    return {
        "aux layers (model runner V1)": _ascending(ids or nested_ids),
        "aux layers (model runner V2)": _ascending(ids),
        "aux layers that fc is sized for": config.get("num_aux_hidden_states") or len(nested_ids or range(3)),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "norm_before_fc": bool(nested.get("norm_before_fc", config.get("norm_before_fc", False))),
        "fc_norm": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False)),
        "max_position_embeddings": config["max_position_embeddings"],
        "num_hidden_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_act": config.get("hidden_act", "silu"),
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "rms_norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "quantization": (config.get("quantization_config") or {}).get("quant_method"),
        **_rope(config),
    }


def check_served(
    config: dict[str, Any], shape: DraftShape, aux_layer_ids: tuple[int, ...], positions: int, dtype: str = "bfloat16"
) -> None:
    """Refuse a config.json that vLLM would read differently from how the head was trained.

    Args:
        config: config.json of either layout, or what an engine made of it.
        shape: of the trained head.
        aux_layer_ids: it was trained on.
        positions: that must be servable.
        dtype: `export.dtype`.

    Raises:
        ValueError: naming every key that differs, with the trained and the served value.
    """
    trained = {**trained_values(shape, aux_layer_ids), "quantization": METHOD if dtype == "fp8" else None}
    served = served_values(config)
    longest = served.pop("max_position_embeddings")
    problems = [
        f"{key}: trained {trained.get(key)!r}, served {served.get(key)!r}"
        for key in sorted({*trained, *served})
        if trained.get(key) != served.get(key)
    ]
    if longest < positions:
        problems.append(
            f"max_position_embeddings: {positions} to be served, {longest} in the head; "
            "vLLM stops drafting for the whole batch once one request passes it"
        )
    if problems:
        raise ValueError("vLLM would not serve the head that was trained:\n  " + "\n  ".join(problems))


def _ascending(ids: list[int] | tuple[int, ...] | None) -> list[int] | str:
    return sorted(set(ids)) if ids else TARGET_DEFAULT


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary embedding key by key; `max_position_embeddings` does not enter the types vLLM computes."""
    return {f"rope {key}": value for key, value in rope_parameters_of(config).items() if value is not None}
