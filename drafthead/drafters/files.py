"""What can be seen of a draft head that somebody else made before an engine is started on it.

Engines find the same things, after their start and at the end of a hundred lines of another program's stack.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from drafthead.target.pieces import TargetSpec


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a head.

    Raises:
        ValueError: it is no JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both
        raise ValueError(f"{path} is not JSON ({error}); fetch the head again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {str(config)[:40]!r}, wanted an object; is it the config.json of a draft head?")
    return config


def check_tensor_files(directory: Path) -> dict[str, list[int]]:
    """Shape of every tensor of a head's safetensors files, read from their headers.

    Raises:
        ValueError: a file is cut short or damaged.
    """
    shapes: dict[str, list[int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or cut short ({error}); fetch the head again") from error
    return shapes


def check_eagle3_files(directory: Path, spec: TargetSpec) -> None:
    """Refuse an EAGLE-3 head that was made for another target, or whose files are damaged.

    Raises:
        ValueError: naming what does not fit and both values.
    """
    config, shapes = read_config(directory), check_tensor_files(directory)
    plain = config.get("transformer_layer_config") or config  # the speculators layout
    hidden = config.get("target_hidden_size") or plain.get("target_hidden_size") or plain.get("hidden_size")
    for key, found, wanted in (
        ("hidden size", hidden, spec.hidden_size), ("vocab_size", plain.get("vocab_size"), spec.vocab_size)
    ):  # fmt: skip
        if found is not None and found != wanted:
            raise ValueError(
                f"{directory} is a head for another target: {key} {found}, but {spec.name} has {wanted}; "
                "give the head that was made for target.path"
            )
    if "d2t" in shapes:
        _check_d2t(directory, spec.vocab_size)


def _check_d2t(directory: Path, vocab_size: int) -> None:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if "d2t" in file.keys():  # noqa: SIM118
                offsets = file.get_tensor("d2t").long()
                ids = offsets + torch.arange(len(offsets))
                if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
                    raise ValueError(
                        f"d2t of {path} leads to the target's tokens {int(ids.min())} to {int(ids.max())}, but there "
                        f"are {vocab_size}: the file is damaged, or the head was made for another target"
                    )
