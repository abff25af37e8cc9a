"""What happens to files: a bit flips, the end is missing, a tensor or a setting is another."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def flip_bit(path: Path, place: float = 1.0) -> None:
    """Change one bit of a file.

    Args:
        path: path of the file.
        place: place of the damage, from 0 (first byte) to 1 (last byte).
    """
    content = bytearray(path.read_bytes())
    content[min(int(len(content) * place), len(content) - 1)] ^= 0x10
    path.write_bytes(content)


def half_written(path: Path) -> Path:
    """What a writer of `path` leaves behind when it is killed: its temporary folder, with half a file."""
    folder = path.with_name(f".{path.name}.0a1b2c3d.tmp")
    folder.mkdir()
    (folder / path.name).write_bytes(b"half")
    (folder / ".tmpHalf0").write_bytes(b"half")  # of a library that has its own way of being atomic
    return folder


def cut_short(path: Path, count: int = 100) -> None:
    """Take so many bytes off the end of a file."""
    path.write_bytes(path.read_bytes()[:-count])


def replace_tensors(path: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace or add tensors of a safetensors file; None takes one out. Its metadata stays."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, metadata=metadata)


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of a model's config.json; None takes one out."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
