"""What happens to files: a bit flips, the end is missing, a tensor is another."""

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def flip_bit(path: Path, place: float = 1.0) -> None:
    """Change one bit of a file.

    Args:
        path: of the file.
        place: where, from 0 (its first byte) to 1 (its last).
    """
    content = bytearray(path.read_bytes())
    content[min(int(len(content) * place), len(content) - 1)] ^= 0x10
    path.write_bytes(content)


def cut_short(path: Path, count: int = 100) -> None:
    """Take so many bytes off the end of a file."""
    path.write_bytes(path.read_bytes()[:-count])


def replace_tensors(path: Path, changes: dict[str, Tensor]) -> None:
    """Replace or add tensors of a safetensors file; its metadata stays."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({**load_file(path), **changes}, path, metadata=metadata)
