"""Rotary embeddings: what a config.json says, in one form, and what a head makes of its target's.

A head is one dense Llama block with full attention, rotated along its whole head_dim. So of a target that rotates
otherwise it takes the part that means something to it: the rotation of the layers with full attention, without the
share of head_dim that is rotated and without the sections of images. These keys must go: an engine that finds them in
the head's config.json rotates as they say, the training module does not.

Of the rest, the keys decide. A type is computed with the keys listed here and with no other, because engines choose
their formula by the keys that are there: vLLM's `dynamic` with `alpha` is another rotation than with `factor`.
`tests/target/test_rope.py` builds the tables of the training module and of vLLM for every form that vLLM knows.
"""

import math
from typing import Any

_ORIGINAL = "original_max_position_embeddings"
# rope_type -> keys that it needs, keys that it may have. longrope switches factors by the serving length, which
# training does not know. Up to max_position_embeddings `dynamic` is the plain rotation.
_COMPUTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
# Read neither by the training module nor by vLLM where a type does not list them.
_WITHOUT_EFFECT = {key for keys in _COMPUTED.values() for some in keys for key in some} | {
    "finetuned", "llama_4_scaling_beta", "max_position_embeddings",
}  # fmt: skip
_FULL = "full_attention"
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")  # names in config.json, today's first
_NOT_A_HEADS = (_PARTIAL[0], "rope_dim", "mrope_section", "mrope_interleaved")


def rope_parameters_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rotation that a config.json describes, in transformers' current form, with what transformers fills in.

    Checkpoints made before transformers 5 keep theta beside `rope_scaling`, whose type may be `type`.
    """
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if isinstance(parameters.get(_FULL), dict):  # one rotation per kind of layer
        parameters = dict(parameters[_FULL])
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    for name in _PARTIAL:
        if config.get(name) is not None:
            parameters.setdefault(_PARTIAL[0], config[name])
    if parameters["rope_type"] in ("llama3", "yarn"):
        original = config.get(_ORIGINAL) or parameters.get(_ORIGINAL) or config.get("max_position_embeddings")
        parameters |= {_ORIGINAL: original} if original else {}
    return {key: value for key, value in parameters.items() if value is not None}


def head_rope(config: dict[str, Any], path: str) -> dict[str, Any]:
    """The rotary parameters of a head for the target with this config.json.

    Args:
        config: config.json of the target's language model.
        path: path of the target, for the error message.

    Raises:
        ValueError: the target's positions are scaled in a way that training and vLLM do not compute alike.
    """
    parameters = {key: value for key, value in rope_parameters_of(config).items() if key not in _NOT_A_HEADS}
    if parameters["rope_type"] == "mrope":  # three axes of an image; of text they are one
        parameters["rope_type"] = "default"
    return _computed(parameters, f"target {path}", "give another target.path")


def imported_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a head made elsewhere, from its plain config.json.

    Raises:
        ValueError: it rotates in a way that training and vLLM do not compute alike.
    """
    rope = rope_parameters_of(config)
    changing = {key: value for key, value in rope.items() if key not in _NOT_A_HEADS or value not in (False, 1)}
    return _computed(changing, "the head", "measure it as it is, as a method of eval.methods")


def _computed(rope: dict[str, Any], whose: str, action: str) -> dict[str, Any]:
    """The keys of a rotation that are computed, with values that vLLM takes.

    Args:
        rope: rotation from `rope_parameters_of`.
        whose: owner of the rotation, the subject of the error message.
        action: what to do about a rotation that is not computed.

    Raises:
        ValueError: naming the type, the key and its value.
    """
    kind = str(rope["rope_type"])
    needed, optional = _COMPUTED.get(kind, ((), ()))
    read = ("rope_type", "rope_theta", *needed, *optional)
    problems = [f"{key}={rope[key]!r}" for key in rope if key not in read and key not in _WITHOUT_EFFECT]
    problems += [f"no {key}" for key in needed if key not in rope]
    problems += [f"{key}={rope[key]!r}" for key in read[1:] if key in rope and not _takes(key, rope[key])]
    if not problems and kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        problems = [f"low_freq_factor={rope['low_freq_factor']} not below high_freq_factor={rope['high_freq_factor']}"]
    if problems or kind not in _COMPUTED:
        described = f"rope_type {kind}" + (f" with {', '.join(problems)}" if problems else "")
        raise ValueError(
            f"{whose} rotates by {described}, for which training and vLLM would compute different rotations; {action}. "
            f"Computed are {', '.join(_COMPUTED)}, each with its own keys (drafthead/target/rope.py)"
        )
    # vLLM takes no whole number for the factor of `linear`.
    return {key: float(rope[key]) if key == "factor" else rope[key] for key in rope if key in read}


def _takes(key: str, value: object) -> bool:
    """Whether a value of a rotation's key is one that all formulas are defined for."""
    if key == "truncate":
        return isinstance(value, bool)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return False
    least = {"mscale": 0, "mscale_all_dim": 0, "factor": 1, "rope_theta": 1 + 1e-9}.get(key, 1e-9)
    return value >= least
