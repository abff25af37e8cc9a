"""EAGLE-3 heads as vLLM 0.32 reads them: config.json and names of tensors, in both directions.

Every key whose default differs between layouts or model runners is written explicitly. Layouts met in public: plain
files (nvidia, lmsys, nebius, yuhuili) with layer ids at the top level, nested, or nowhere; and the speculators layout
(Red Hat), whose config.json names the target, so that `vllm serve HEAD` needs nothing else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drafthead.drafters.base import DraftShape
from drafthead.drafters.eagle3.config import Eagle3Head, EagleHead
from drafthead.drafters.vllm import (
    Config,
    decoder_config,
    decoder_section,
    read_tensors,
    served_decoder,
    written_tensors,
)
from drafthead.target.pieces import TargetSpec
from drafthead.target.rope import rope_parameters_of

METHOD = "eagle3"  # of --speculative-config
ALGORITHM = "EAGLE-3"
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
)  # in config.json
TARGET_DEFAULT = "the target's default"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# In the speculators layout vLLM builds the draft's config from `transformer_layer_config`, then copies these keys from
# beside it, with its own defaults (None: not copied). The number of aux layers and `eagle_config` are not among them: a
# head with another number of aux layers than three loads only when both stand inside.
_BESIDE_LAYER = {
    "draft_vocab_size": None, "target_hidden_size": None, "norm_before_residual": True, "norm_before_fc": False,
    "fc_norm": False, "norm_output": False, LAYER_IDS: None,
}  # fmt: skip
# The first layer's name in a checkpoint and in each layout; vLLM reads both, other tools their own.
_FIRST_LAYER = {"vllm": "midlayer.", "speculators": "layers.0."}
# Copies of the target that some trainers store in the head, for training only.
_OF_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")


def speculative_config(directory: Path | str, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's --speculative-config for an exported head of the plain layout."""
    return {"method": METHOD, "model": str(directory), "num_speculative_tokens": num_speculative_tokens}


def plain_config(shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
    """config.json of the plain layout.

    Args:
        shape: of the head, with the positions and the rotation to be served.
        aux_layer_ids: ascending boundary indices.
        dtype: of the weights, by torch's name.
    """
    norms = {name: getattr(shape.head, name) for name in _NORMS}
    ids = list(aux_layer_ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **decoder_config(shape, dtype),
        **norms,
        "num_aux_hidden_states": len(ids),
        # Model runner V2 reads the ids at the top level only, V1 takes the nested ones where there are none.
        LAYER_IDS: ids,
        "eagle_config": {LAYER_IDS: ids, "use_aux_hidden_state": True, "norm_before_fc": norms["norm_before_fc"]},
        "bos_token_id": None,
        "eos_token_id": None,
    }


def speculators_config(
    config: Config, num_speculative_tokens: int, verifier: Config, algorithm: str = METHOD,
    beside_layer: Config = _BESIDE_LAYER,
) -> Config:  # fmt: skip
    """config.json of the speculators layout, from the plain one.

    Args:
        config: plain.
        num_speculative_tokens: K to be served unless the user says otherwise.
        verifier: the target: `name_or_path`, a hub id or the absolute path of a directory, and `architectures`.
        algorithm: as that layout names it.
        beside_layer: keys that vLLM copies from beside the layer's, and their defaults.
    """
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": num_speculative_tokens, "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }  # fmt: skip
    beside = ("architectures", "dtype", *beside_layer)
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": algorithm,
        "dtype": config["dtype"],
        **{key: config[key] for key in beside_layer},
        "tie_word_embeddings": False,
        "transformer_layer_config": {key: value for key, value in config.items() if key not in beside},
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }


def served_values(config: Config) -> Config:
    """What vLLM makes of a config.json of either layout: its keys that decide what a head computes.

    Raises:
        KeyError: a key without a default is missing.
        ValueError: it is of the speculators layout and describes another algorithm.
    """
    plain = plain_form(config)
    nested = plain.get("eagle_config") or {}
    ids, nested_ids = plain.get(LAYER_IDS), nested.get(LAYER_IDS)
    return {
        **served_decoder(plain),
        **{name: bool(plain.get(name, False)) for name in _NORMS},
        "norm_before_fc": bool(nested.get("norm_before_fc", plain.get("norm_before_fc", False))),
        # fc is sized by the count, else by the nested ids, else for three.
        "num_aux_hidden_states": plain.get("num_aux_hidden_states") or len(nested_ids or range(3)),
        LAYER_IDS: _ascending(ids),
        f"eagle_config.{LAYER_IDS}": _ascending(ids or nested_ids),
    }


def plain_form(config: Config, algorithm: str = METHOD, beside_layer: Config = _BESIDE_LAYER) -> Config:
    """The plain config that vLLM makes of a speculators one, its defaults included; a plain one as it is."""
    if "speculators_model_type" not in config and "speculators_config" not in config:
        return config
    if config.get("speculators_model_type") != algorithm:
        raise ValueError(f"speculators_model_type {config.get('speculators_model_type')!r} is not {algorithm}")
    beside = {key: config.get(key, default) for key, default in beside_layer.items()}
    return config["transformer_layer_config"] | {key: value for key, value in beside.items() if value is not None}


def _ascending(ids: list[int] | None) -> list[int] | str:
    return sorted(set(ids)) if ids else TARGET_DEFAULT


def describe(
    config: Config, tensors: Mapping[str, Tensor], spec: TargetSpec, layer_ids_are: str | None,
    section: type[EagleHead] = Eagle3Head, **own: Any,
) -> tuple[DraftShape, tuple[int, ...]]:  # fmt: skip
    """The shape of a public head and the ascending boundaries that it reads.

    Args:
        config: config.json of either layout; defaults are those that vLLM applies.
        tensors: by checkpoint names; the number of aux layers is the width of fc.
        spec: of the target.
        layer_ids_are: "boundaries", "blocks" (counted from 0), or None when the ids leave no doubt.
        section: of the recipe that describes it.
        own: that section's further fields.

    Raises:
        ValueError: the head is not for this target, uses what is not computed here, or its layer ids are unclear.
    """
    if "fc.weight" not in tensors:
        raise ValueError(f"the head has no fc.weight: not an {ALGORITHM} head ({sorted(tensors)[:3]} ...)")
    try:
        served = served_values(config)
    except KeyError as error:
        raise ValueError(f"the head's config.json has no key {error}: is it that of a draft head?") from error
    fields = {**decoder_section(served, spec), **{name: served[name] for name in _NORMS}}
    num_aux_layers = tensors["fc.weight"].shape[1] // spec.hidden_size
    shape = DraftShape(
        section(**{"type": "eagle3", **fields, **own}), spec.hidden_size, spec.vocab_size, num_aux_layers,
        served["rms_norm_eps"], rope_parameters_of(plain_form(config)), served["max_position_embeddings"],
    )  # fmt: skip
    ids = served[f"eagle_config.{LAYER_IDS}"]
    return shape, _boundaries(ids, num_aux_layers, spec.num_layers, layer_ids_are)


def _boundaries(
    found: list[int] | str, num_aux_layers: int, num_layers: int, layer_ids_are: str | None
) -> tuple[int, ...]:
    """Boundary indices from the ids of config.json, which does not state how it counts: vLLM and this project count
    boundaries (id k is the state after k blocks), SGLang and files written for it blocks from 0, one less."""
    default = [2, num_layers // 2, num_layers - 3]
    ids = default if found == TARGET_DEFAULT else [int(i) for i in found]
    if len(ids) != num_aux_layers:
        raise ValueError(f"config.json names aux layers {found}, but fc reads {num_aux_layers}")
    if layer_ids_are is None and ids == [i - 1 for i in default]:
        raise ValueError(
            f"aux layers {ids} are one below the usual {default}: probably blocks counted from 0. "
            "State which they are: --layer-ids-are blocks, or --layer-ids-are boundaries"
        )
    blocks = layer_ids_are == "blocks" and found != TARGET_DEFAULT
    return tuple(i + 1 for i in ids) if blocks else tuple(ids)


def exported_tensors(
    weights: dict[str, Tensor], shape: DraftShape, dtype: str, layout: str = "vllm"
) -> dict[str, Tensor]:
    """A checkpoint's tensors as a file of that dtype holds them."""
    written = written_tensors(weights, shape, dtype)
    return {name.replace(_FIRST_LAYER["vllm"], _FIRST_LAYER[layout]): tensor for name, tensor in written.items()}


def checkpoint_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors, of any layout, under the names of a checkpoint and without copies of the target."""
    own = {name: tensor for name, tensor in read_tensors(tensors).items() if name not in _OF_TARGET}
    return {name.replace(_FIRST_LAYER["speculators"], _FIRST_LAYER["vllm"]): tensor for name, tensor in own.items()}
