"""The speculators layout of a head: config.json names the target, so `vllm serve HEAD` needs nothing else.

vLLM 0.32 builds the draft's config from `transformer_layer_config`, then copies a fixed list of keys from beside it.
The number of aux layers is not on that list, nor is `eagle_config`: a head with another number of
aux layers than three only loads when both stand inside. `norm_before_residual` defaults to true here, to false there.
"""

from typing import Any

_COPIED = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_TAPS = "eagle_aux_hidden_state_layer_ids"
_NOT_OF_THE_LAYER = ("architectures", "dtype", *_COPIED, _TAPS)


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json is of this layout."""
    return "speculators_model_type" in config or "speculators_config" in config


def to_speculators(plain: dict[str, Any], target: str, target_architectures: list[str], num_draft_tokens: int) -> dict:
    """The speculators form of a plain config.json.

    Args:
        plain: from `contract.head_config`.
        target: hub id, or the absolute path of a directory.
        target_architectures: from the target's config.json.
        num_draft_tokens: K to be served unless the user says otherwise.
    """
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "dtype": plain["dtype"],
        **{key: plain[key] for key in (*_COPIED, _TAPS)},
        "tie_word_embeddings": False,
        "transformer_layer_config": {key: value for key, value in plain.items() if key not in _NOT_OF_THE_LAYER},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_draft_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": target_architectures},
        },
    }


def from_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """The plain config that vLLM makes of a speculators one, its defaults included.

    Raises:
        ValueError: it describes another algorithm than EAGLE-3.
    """
    if config.get("speculators_model_type") != "eagle3":
        raise ValueError(f"speculators_model_type {config.get('speculators_model_type')!r} is not eagle3")
    plain = dict(config["transformer_layer_config"])
    plain |= {key: config[key] for key in ("draft_vocab_size", "target_hidden_size") if config.get(key) is not None}
    plain["norm_before_residual"] = config.get("norm_before_residual", True)
    plain |= {key: config.get(key, False) for key in ("norm_before_fc", "fc_norm", "norm_output")}
    if config.get(_TAPS):
        plain[_TAPS] = config[_TAPS]
    return plain
