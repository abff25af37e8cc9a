"""The rotary embedding a head is served with: its target's, or YaRN for a head that was trained short."""

from dataclasses import replace

from drafthead.config import ExportConfig
from drafthead.drafters.base import DraftShape


def served_shape(shape: DraftShape, export: ExportConfig) -> DraftShape:
    """The head's shape with the exported positions.

    With `export.yarn_from` = P the rotation is interpolated by YaRN (arXiv:2309.00071) from P to
    max_position_embeddings. Given up: exactness. The head then rotates otherwise than it was trained, which costs
    acceptance at short positions too; measure both.

    Raises:
        ValueError: the target's own rotation is scaled already, or there is nothing to stretch.
    """
    positions = export.max_position_embeddings or shape.max_position_embeddings
    if export.yarn_from is None:
        return replace(shape, max_position_embeddings=positions)
    kind = shape.rope_parameters["rope_type"]
    if kind != "default":
        raise ValueError(
            f"export.yarn_from {export.yarn_from}: the target's rotation is already {kind}, and the head was trained "
            "with it at true positions; leave export.yarn_from out"
        )
    if export.yarn_from >= positions:
        raise ValueError(
            f"export.yarn_from {export.yarn_from} is not below the {positions} positions to be served: "
            "raise export.max_position_embeddings, or leave export.yarn_from out"
        )
    rope = {
        "rope_type": "yarn",
        "rope_theta": shape.rope_parameters["rope_theta"],
        "factor": positions / export.yarn_from,
        "original_max_position_embeddings": export.yarn_from,
    }
    return replace(shape, rope_parameters=rope, max_position_embeddings=positions)
