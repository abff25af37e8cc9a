"""Rotary embeddings: what a config.json says, in one form, and what a head makes of its target's.

A head is one dense Llama block with full attention, rotated along its whole head_dim. So of a target that rotates
otherwise it takes the part that means something to it: the rotation of the layers with full attention, without the
share of head_dim that is rotated and without the sections of images. These keys must go: an engine that finds them in
the head's config.json rotates as they say, the training module does not.
"""

from typing import Any

# Those that the training module and vLLM compute alike at every position. longrope switches factors by the serving
# length, which training does not know.
_ALIKE = ("default", "linear", "dynamic", "llama3", "yarn")
_FULL = "full_attention"
_PARTIAL = "partial_rotary_factor"
_NOT_A_HEADS = (_PARTIAL, "mrope_section", "mrope_interleaved")


def rope_parameters_of(config: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints made before transformers 5 keep theta beside `rope_scaling`, whose type may be `type`."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if isinstance(parameters.get(_FULL), dict):  # one rotation per kind of layer
        parameters = dict(parameters[_FULL])
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if _PARTIAL in config:
        parameters.setdefault(_PARTIAL, config[_PARTIAL])
    return parameters


def check_computed(rope: dict[str, Any]) -> None:
    """See that a head made elsewhere rotates in a way that training and vLLM compute alike.

    Raises:
        ValueError: it does not.
    """
    partly = [key for key in _NOT_A_HEADS if rope.get(key) not in (None, False, 1.0)]
    if partly or rope["rope_type"] not in _ALIKE:
        raise ValueError(
            f"the head rotates by {rope}, of which {', '.join(partly) or rope['rope_type']} is not computed here; "
            "measure it as it is, as a method of eval.methods"
        )


def head_rope(config: dict[str, Any], path: str) -> dict[str, Any]:
    """The rotary parameters of a head for the target with this config.json.

    Args:
        config: of the target's language model.
        path: of the target, for the error message.

    Raises:
        ValueError: the target's positions are scaled in a way that training and vLLM do not compute alike.
    """
    parameters = {key: value for key, value in rope_parameters_of(config).items() if key not in _NOT_A_HEADS}
    if parameters["rope_type"] == "mrope":  # three axes of an image; of text they are one
        parameters["rope_type"] = "default"
    if parameters["rope_type"] not in _ALIKE:
        raise ValueError(
            f"target {path} rotates by {parameters['rope_type']}: a head that is trained with it would be served with "
            f"another rotation; known ones: {', '.join(_ALIKE)}"
        )
    return parameters
