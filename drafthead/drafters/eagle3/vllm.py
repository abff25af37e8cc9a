"""EAGLE-3 heads as vLLM reads them: config.json and tensors, in both directions.

Most keys that decide what a head computes leave no trace in the shapes of its tensors: a head that was trained without
`norm_before_residual` and is served with it loads without an error and drafts garbage. So one table, `_KEYS`, states of
every key what is written and how vLLM reads it. Writing, reading back, comparing and importing follow from it.
Checked against vLLM 0.32. Every key whose default differs between layouts or model runners is written explicitly.

Layouts met in public: plain files (nvidia, lmsys, nebius, yuhuili) with layer ids at the top level, nested, or nowhere;
and the speculators layout (Red Hat), whose config.json names the target, so that `vllm serve HEAD` needs nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafthead.artifacts import describe_difference
from drafthead.config import ExportConfig
from drafthead.drafters.base import DraftShape, parameter_shapes
from drafthead.drafters.eagle3.config import Eagle3Head
from drafthead.drafters.files import check_tensor_files, read_config
from drafthead.drafters.fp8 import QUANT_METHOD, cast, dequantised, quantisation_config
from drafthead.target.pieces import TargetPieces, TargetSpec
from drafthead.target.rope import rope_parameters_of

METHOD = "eagle3"  # of --speculative-config
ALGORITHM = "EAGLE-3"
TARGET_DEFAULT = "the target's default"
Config = dict[str, Any]

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "eagle_config"
_NESTED_IDS = f"{_NESTED}.{_LAYER_IDS}"


@dataclass(frozen=True)
class _Key:
    """A key of config.json.

    Attributes:
        name: of the key; behind a dot, of one in the dictionary `eagle_config`.
        of: what it states of the trained head: an attribute of `DraftShape`, "aux_layer_ids" or "dtype". Empty where
            all heads have the same value.
        read: what vLLM makes of a plain config, its default and the precedence of other keys included. None where the
            head computes the same whatever the key says.
        constant: the value of all heads.
    """

    name: str
    of: str = ""
    read: Callable[[Config], Any] | None = None
    constant: Any = None


def _required(name: str) -> Callable[[Config], Any]:
    return lambda config: config[name]


def _flag(name: str) -> Callable[[Config], Any]:
    return lambda config: bool(config.get(name, False))


def _or(name: str, other: str) -> Callable[[Config], Any]:
    return lambda config: config.get(name) or config[other]


def _nested(config: Config) -> Config:
    return config.get(_NESTED) or {}


def _ascending(ids: list[int] | None) -> list[int] | str:
    return sorted(set(ids)) if ids else TARGET_DEFAULT


def _rope(config: Config) -> Config:
    """`max_position_embeddings` does not enter the types that vLLM computes."""
    return {key: value for key, value in rope_parameters_of(config).items() if value is not None}


_KEYS = (  # in the order of the file
    _Key("architectures", constant=["LlamaForCausalLMEagle3"]),
    _Key("model_type", constant="llama"),
    _Key("dtype", "dtype"),
    _Key("hidden_size", "hidden_size", _required("hidden_size")),
    _Key("target_hidden_size", "hidden_size", _or("target_hidden_size", "hidden_size")),
    _Key("intermediate_size", "head.intermediate_size", _required("intermediate_size")),
    _Key("num_hidden_layers", "head.num_layers", _required("num_hidden_layers")),
    _Key("num_attention_heads", "head.num_attention_heads", _required("num_attention_heads")),
    _Key("num_key_value_heads", "head.num_key_value_heads", _or("num_key_value_heads", "num_attention_heads")),
    _Key("head_dim", "head.head_dim", lambda c: c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]),
    _Key("hidden_act", read=lambda c: c.get("hidden_act", "silu"), constant="silu"),
    _Key("rms_norm_eps", "rms_norm_eps", _required("rms_norm_eps")),
    _Key("attention_bias", read=_flag("attention_bias"), constant=False),
    _Key("mlp_bias", read=_flag("mlp_bias"), constant=False),
    _Key("vocab_size", "vocab_size", _required("vocab_size")),
    _Key("draft_vocab_size", "head.draft_vocab_size", _or("draft_vocab_size", "vocab_size")),
    _Key("tie_word_embeddings", constant=False),
    # Less than what is served makes vLLM stop drafting for a whole batch once one request passes it.
    _Key("max_position_embeddings", "max_position_embeddings", _required("max_position_embeddings")),
    _Key("rope_parameters", "rope_parameters", _rope),
    _Key("norm_before_residual", "head.norm_before_residual", _flag("norm_before_residual")),
    _Key("norm_before_fc", "head.norm_before_fc"),  # the nested one, below, goes before it
    _Key("fc_norm", "head.fc_norm", _flag("fc_norm")),
    _Key("norm_output", "head.norm_output", _flag("norm_output")),
    # fc is sized by the count, else by the nested ids, else for three.
    _Key(
        "num_aux_hidden_states",
        "num_aux_layers",
        lambda c: c.get("num_aux_hidden_states") or len(_nested(c).get(_LAYER_IDS) or range(3)),
    ),
    # Model runner V2 reads the ids at the top level only, V1 takes the nested ones where there are none.
    _Key(_LAYER_IDS, "aux_layer_ids", lambda c: _ascending(c.get(_LAYER_IDS))),
    _Key(_NESTED_IDS, "aux_layer_ids", lambda c: _ascending(c.get(_LAYER_IDS) or _nested(c).get(_LAYER_IDS))),
    _Key(f"{_NESTED}.use_aux_hidden_state", constant=True),
    _Key(
        f"{_NESTED}.norm_before_fc",
        "head.norm_before_fc",
        lambda c: bool(_nested(c).get("norm_before_fc", c.get("norm_before_fc", False))),
    ),
    _Key("bos_token_id"),
    _Key("eos_token_id"),
)

# In the speculators layout vLLM builds the draft's config from `transformer_layer_config`, then copies these keys from
# beside it, with these defaults (None: what stands inside stays). The number of aux layers and `eagle_config` are not
# among them: a head with another number of aux layers than three loads only when both stand inside.
_BESIDE_LAYER = {
    "draft_vocab_size": None, "target_hidden_size": None, "norm_before_residual": True, "norm_before_fc": False,
    "fc_norm": False, "norm_output": False, _LAYER_IDS: None,
}  # fmt: skip


def speculative_config(directory: Path | str, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's --speculative-config for an exported head of the plain layout."""
    return {"method": METHOD, "model": str(directory), "num_speculative_tokens": num_speculative_tokens}


def write_config(
    shape: DraftShape,
    aux_layer_ids: tuple[int, ...],
    export: ExportConfig,
    num_speculative_tokens: int,
    target: str,
    target_architectures: list[str],
) -> Config:
    """config.json of an exported head.

    Args:
        shape: of the head, with the positions and the rotation to be served.
        aux_layer_ids: ascending boundary indices.
        export: dtype and layout ("vllm": plain).
        num_speculative_tokens: K to be served unless the user says otherwise; speculators layout only, as the next two.
        target: hub id, or the absolute path of a directory.
        target_architectures: from the target's config.json.
    """
    config: Config = {}
    for name, value in _trained_values(shape, aux_layer_ids, export.dtype).items():
        parent = config.setdefault(_NESTED, {}) if name.startswith(f"{_NESTED}.") else config
        parent[name.removeprefix(f"{_NESTED}.")] = value
    if export.dtype == "fp8":
        config["quantization_config"] = quantisation_config()
    if export.format == "vllm":
        return config
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": num_speculative_tokens, "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }  # fmt: skip
    beside = ("architectures", "dtype", *_BESIDE_LAYER)
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": METHOD,
        "dtype": config["dtype"],
        **{key: config[key] for key in _BESIDE_LAYER},
        "tie_word_embeddings": False,
        "transformer_layer_config": {key: value for key, value in config.items() if key not in beside},
        "speculators_config": {
            "algorithm": METHOD,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": target_architectures},
        },
    }


def _trained_values(shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """The value of every key of the table for a trained head."""
    of_floats = "bfloat16" if dtype == "fp8" else dtype
    head = SimpleNamespace(**vars(shape), aux_layer_ids=list(aux_layer_ids), dtype=of_floats)
    return {key.name: attrgetter(key.of)(head) if key.of else key.constant for key in _KEYS}


def served_values(config: Config) -> dict[str, Any]:
    """What vLLM makes of a config.json of either layout, by the keys of the table that decide what a head computes.

    Raises:
        ValueError: it is of the speculators layout and describes another algorithm.
    """
    plain = _plain(config)
    return {key.name: key.read(plain) for key in _KEYS if key.read}


def _plain(config: Config) -> Config:
    """The plain config that vLLM makes of a speculators one, its defaults included; a plain one as it is."""
    if "speculators_model_type" not in config and "speculators_config" not in config:
        return config
    if config.get("speculators_model_type") != METHOD:
        raise ValueError(f"speculators_model_type {config.get('speculators_model_type')!r} is not {METHOD}")
    beside = {key: config.get(key, default) for key, default in _BESIDE_LAYER.items()}
    return config["transformer_layer_config"] | {key: value for key, value in beside.items() if value is not None}


def check_config(
    config: Config, shape: DraftShape, aux_layer_ids: tuple[int, ...], positions: int, dtype: str = "bfloat16"
) -> None:
    """Refuse a config.json that vLLM would read differently from how the head was trained.

    Args:
        config: config.json of either layout, or what an engine made of it.
        shape: of the trained head.
        aux_layer_ids: it was trained on.
        positions: that must be servable.
        dtype: `export.dtype`.

    Raises:
        ValueError: naming every key that differs, with the served and the trained value.
    """
    served = served_values(config)
    trained = {key: value for key, value in _trained_values(shape, aux_layer_ids, dtype).items() if key in served}
    trained["rope_parameters"] = _rope(trained)
    served["quantization_config.quant_method"] = (_plain(config).get("quantization_config") or {}).get("quant_method")
    trained["quantization_config.quant_method"] = QUANT_METHOD if dtype == "fp8" else None
    longest = trained["max_position_embeddings"] = served["max_position_embeddings"]  # any that is long enough will do
    problems = [describe_difference(served, trained)] if served != trained else []
    if longest < positions:
        problems.append(
            f"  max_position_embeddings: found {longest}, wanted {positions} to be served; vLLM stops drafting for the "
            "whole batch once one request passes it"
        )
    if problems:
        lines = "\n".join(problems)
        raise ValueError(f"vLLM would not serve the head that was trained; found in config.json, wanted:\n{lines}")


def describe(
    config: Config, tensors: Mapping[str, Tensor], spec: TargetSpec, layer_ids_are: str | None
) -> tuple[DraftShape, tuple[int, ...]]:
    """The shape of a public head and the ascending boundaries that it reads.

    config.json does not state how aux layer ids are counted: vLLM and this project count boundaries (id k is the state
    after k blocks), SGLang and files written for it count blocks from 0, one less for the same state.

    Args:
        config: config.json of either layout; defaults are those that vLLM applies.
        tensors: by checkpoint names; the number of aux layers is the width of fc.
        spec: of the target.
        layer_ids_are: "boundaries", "blocks" (counted from 0), or None when the ids leave no doubt.

    Raises:
        ValueError: the head is not for this target, uses what is not computed here, or its layer ids are unclear.
    """
    if "fc.weight" not in tensors:
        raise ValueError(f"the head has no fc.weight: not an {ALGORITHM} head ({sorted(tensors)[:3]} ...)")
    try:
        served = served_values(config)
    except KeyError as error:
        raise ValueError(f"the head's config.json has no key {error}: is it that of a draft head?") from error
    head = {}
    for key in (key for key in _KEYS if key.read):
        found = served[key.name]
        of_target = getattr(spec, key.of) if key.of in ("hidden_size", "vocab_size") else found
        if found != of_target:
            raise ValueError(f"the head has {key.name} {found}, target {spec.name} has {of_target}: not a head for it")
        if not key.of and found != key.constant:
            raise ValueError(f"the head's config.json sets {key.name}={found!r}; supported is {key.constant!r}")
        if key.of.startswith("head."):
            head[key.of.removeprefix("head.")] = found
    num_aux_layers = tensors["fc.weight"].shape[1] // spec.hidden_size
    shape = DraftShape(
        Eagle3Head(type="eagle3", **head), spec.hidden_size, spec.vocab_size, num_aux_layers, served["rms_norm_eps"],
        rope_parameters_of(_plain(config)), served["max_position_embeddings"],
    )  # fmt: skip
    ids = served[_NESTED_IDS]
    return shape, _boundaries(ids, num_aux_layers, spec.num_layers, layer_ids_are)


def _boundaries(
    found: list[int] | str, num_aux_layers: int, num_layers: int, layer_ids_are: str | None
) -> tuple[int, ...]:
    default = [2, num_layers // 2, num_layers - 3]
    if found == TARGET_DEFAULT:
        if num_aux_layers != len(default):
            raise ValueError(f"config.json names no aux layer ids and fc reads {num_aux_layers} states: add them to it")
        return tuple(default)
    ids = [int(i) for i in found]
    if len(ids) != num_aux_layers:
        raise ValueError(f"config.json names aux layers {ids}, but fc reads {num_aux_layers}")
    if layer_ids_are is None and ids == [i - 1 for i in default]:
        raise ValueError(
            f"aux layers {ids} are one below the usual {default}: probably blocks counted from 0. "
            "State which they are: --layer-ids-are blocks, or --layer-ids-are boundaries"
        )
    return tuple(i + 1 for i in ids) if layer_ids_are == "blocks" else tuple(ids)


_MAPS = ("d2t", "t2d")
# The first layer's name in a checkpoint and in each layout; vLLM reads both, other tools their own.
_FIRST_LAYER = {"vllm": "midlayer.", "speculators": "layers.0."}
# Copies of the target that some trainers store in the head, for training only.
_OF_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")


def expected_shapes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint."""
    return {**parameter_shapes(shape), "d2t": (shape.head.draft_vocab_size,), "t2d": (shape.vocab_size,)}


def exported_tensors(
    weights: dict[str, Tensor], shape: DraftShape, dtype: str, layout: str = "vllm"
) -> dict[str, Tensor]:
    """A checkpoint's tensors as a file in `export.dtype` holds them.

    d2t and t2d are left out where the head proposes the target's whole vocabulary: vLLM refuses them there.
    """
    whole = shape.head.draft_vocab_size == shape.vocab_size
    kept = {name: tensor for name, tensor in weights.items() if not (whole and name in _MAPS)}
    return {name.replace(_FIRST_LAYER["vllm"], _FIRST_LAYER[layout]): t for name, t in cast(kept, dtype).items()}


def checkpoint_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors, of any layout, under the names of a checkpoint: fp8 weights multiplied out, no copies of the
    target.

    Raises:
        ValueError: a tensor is there twice, or one in fp8 has no fitting scale.
    """
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if len(plain) != len(tensors):
        raise ValueError("the head holds the same tensor with and without the prefix `model.`")
    own = {name: tensor for name, tensor in dequantised(plain).items() if name not in _OF_TARGET}
    return {name.replace(_FIRST_LAYER["speculators"], _FIRST_LAYER["vllm"]): tensor for name, tensor in own.items()}


def check_tensors(weights: dict[str, Tensor], shape: DraftShape) -> None:
    """Compare a checkpoint's tensors with those of a head.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape, not finite, or d2t and t2d disagree.
    """
    wanted = expected_shapes(shape)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = [describe_difference(found, wanted)] if found != wanted else []
    problems += [
        f"  {name}: has values that are not finite"
        for name, tensor in weights.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if not problems:
        ids, marked = weights["d2t"] + torch.arange(len(weights["d2t"])), weights["t2d"].nonzero()[:, 0]
        if not torch.equal(ids, marked):
            problems = [f"  d2t maps to {len(ids.unique())} target tokens, which are not the {len(marked)} of t2d"]
    if problems:
        raise ValueError("the tensors are not those of the head (shapes):\n" + "\n".join(problems))


def completed(tensors: dict[str, Tensor], draft_vocab_size: int, pieces: TargetPieces) -> dict[str, Tensor]:
    """A public head's tensors in float32, with what the file leaves to the target: lm_head, the maps of a whole
    vocabulary.

    Args:
        tensors: by checkpoint names.
        draft_vocab_size: D.
        pieces: of the target; its embedding is the only one a head can have here.

    Raises:
        ValueError: the head has an embedding of its own, a pruned vocabulary without d2t, or a d2t of ids.
    """
    tensors = dict(tensors)
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and not torch.equal(embedding.bfloat16(), pieces.embed_tokens.bfloat16()):
        raise ValueError("the head has an embedding of its own, not its target's; vLLM may serve the original")
    vocab_size = pieces.embed_tokens.shape[0]
    if draft_vocab_size == vocab_size:
        tensors |= {"d2t": torch.zeros(vocab_size, dtype=torch.int64), "t2d": torch.ones(vocab_size, dtype=torch.bool)}
    elif "d2t" not in tensors:
        raise ValueError(f"the head proposes {draft_vocab_size} of {vocab_size} tokens and has no d2t to say which")
    else:
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[_target_ids(tensors["d2t"], vocab_size, "the head")] = True
        tensors |= {"d2t": tensors["d2t"].long(), "t2d": tensors.get("t2d", t2d).bool()}
    if "lm_head.weight" not in tensors:  # tied to the target's, or left out because it is
        tensors["lm_head.weight"] = pieces.lm_head[tensors["t2d"].nonzero()[:, 0]]
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def _target_ids(d2t: Tensor, vocab_size: int, where: object) -> Tensor:
    """(D,) offsets -> (D,) target ids."""
    ids = d2t.long() + torch.arange(len(d2t))
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise ValueError(
            f"d2t of {where} leads to the target's tokens {int(ids.min())} to {int(ids.max())}, but there are "
            f"{vocab_size}: it is damaged, was made for another target, or holds ids instead of offsets"
        )
    return ids


def check_files(directory: Path, spec: TargetSpec) -> None:
    """Refuse somebody's head that was made for another target, or whose files are damaged, before an engine starts.

    Raises:
        ValueError: naming what does not fit and both values.
    """
    config, files = read_config(directory), check_tensor_files(directory)
    plain = config.get("transformer_layer_config") or config  # whatever the algorithm: P-EAGLE has the same keys
    hidden = config.get("target_hidden_size") or plain.get("target_hidden_size") or plain.get("hidden_size")
    for key, found, wanted in (
        ("hidden size", hidden, spec.hidden_size), ("vocab_size", plain.get("vocab_size"), spec.vocab_size)
    ):  # fmt: skip
        if found is not None and found != wanted:
            raise ValueError(
                f"{directory} is a head for another target: {key} {found}, but {spec.name} has {wanted}; "
                "give the head that was made for target.path"
            )
    if "d2t" in files:
        with safe_open(files["d2t"], framework="pt") as file:
            _target_ids(file.get_tensor("d2t"), spec.vocab_size, files["d2t"])
