"""What a public config.json says about a head, in this project's terms.

Layouts met in public: plain files (nvidia, lmsys, nebius, yuhuili) with layer ids at the top level, nested, or nowhere;
and the speculators layout (Red Hat), whose layer stands in a dictionary of its own. Defaults are those vLLM applies.
One thing config.json does not say is how aux layer ids are counted: vLLM and this project count boundaries (id k is the
state after k blocks), SGLang and files written for it count blocks from 0, one less for the same state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafthead.config import HeadConfig
from drafthead.exporting.served import TARGET_DEFAULT, served_values
from drafthead.target.pieces import TargetSpec
from drafthead.target.rope import rope_parameters_of


@dataclass(frozen=True)
class Description:
    """A head's shape.

    Attributes:
        head: as a recipe would describe it.
        aux_layer_ids: ascending boundaries.
        rope_parameters: it rotates with; public heads do not always use their target's.
        rms_norm_eps: of its norms.
        max_position_embeddings: it was made for.
    """

    head: HeadConfig
    aux_layer_ids: tuple[int, ...]
    rope_parameters: dict[str, Any]
    rms_norm_eps: float
    max_position_embeddings: int


def describe(
    plain: dict[str, Any], tensors: Mapping[str, Tensor], spec: TargetSpec, layer_ids_are: str | None
) -> Description:
    """Read a plain config against its tensors and its target.

    Args:
        plain: config.json without the speculators wrapping.
        tensors: by checkpoint names; the number of aux layers is the width of fc.
        spec: of the target.
        layer_ids_are: "boundaries", "blocks" (counted from 0), or None when the ids leave no doubt.

    Raises:
        ValueError: the head is not for this target, uses what is not computed here, or its layer ids are unclear.
    """
    try:
        served = served_values(plain)
    except KeyError as error:
        raise ValueError(
            f"the head's config.json has no key {error}: is it the config.json of a draft head?"
        ) from error
    _check_target(served, spec)
    for key, computed in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if served[key] != computed:
            raise ValueError(f"the head's config.json sets {key}={served[key]!r}; this project computes {computed!r}")
    num_aux_layers = tensors["fc.weight"].shape[1] // spec.hidden_size
    head = HeadConfig(
        draft_vocab_size=served["draft_vocab_size"],
        num_layers=served["num_hidden_layers"],
        **{name: served[name] for name in _SAME_NAME},
    )
    return Description(
        head=head,
        aux_layer_ids=_aux_layer_ids(
            served["aux layers (model runner V1)"], num_aux_layers, spec.num_layers, layer_ids_are
        ),
        rope_parameters=rope_parameters_of(plain),
        rms_norm_eps=served["rms_norm_eps"],
        max_position_embeddings=served["max_position_embeddings"],
    )


_SAME_NAME = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "norm_before_residual",
    "norm_before_fc", "fc_norm", "norm_output",
)  # fmt: skip


def _check_target(served: dict[str, Any], spec: TargetSpec) -> None:
    for key, wanted in (
        ("hidden_size", spec.hidden_size), ("target_hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size),
    ):  # fmt: skip
        if served[key] != wanted:
            raise ValueError(f"the head has {key} {served[key]}, target {spec.name} has {wanted}: not a head for it")


def _aux_layer_ids(
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
            "Say which they are: --layer-ids-are blocks, or --layer-ids-are boundaries"
        )
    return tuple(i + 1 for i in ids) if layer_ids_are == "blocks" else tuple(ids)
