"""The files of a head that somebody else made, read before an engine is started on it.

Engines find the same defects, after their start and at the end of a hundred lines of another program's stack.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


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


def check_tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor of a head's safetensors files, from their headers.

    Raises:
        ValueError: a file is cut short or damaged.
    """
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or cut short ({error}); fetch the head again") from error
    return files
