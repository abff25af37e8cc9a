"""Reading a public head's two files: config.json, and its tensors from safetensors only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from drafthead.drafters.files import check_tensor_files, read_config
from drafthead.target.files import local_files

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_CONVERT = """{names}: pickles are not opened, because opening one runs whatever code it holds. If you trust its maker,
convert it once, in a process and place of its own, and import the result:
    python -c "import sys, torch; from safetensors.torch import save_file; \\
        t = torch.load(sys.argv[1], map_location='cpu', weights_only=True); \\
        save_file({{k: v.contiguous().clone() for k, v in t.items()}}, sys.argv[2])" \\
        {source} {directory}/model.safetensors"""


@dataclass(frozen=True)
class PublicHead:
    """A head as published.

    Attributes:
        directory: where its files lie.
        config: config.json as written.
        tensors: by the names of the file.
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_public_head(path: str, revision: str | None = None) -> PublicHead:
    """Read a directory or a hub id.

    Raises:
        FileNotFoundError: there is no config.json, or no tensors at all.
        ValueError: a file is damaged, or the tensors are pickled; the message has the command that converts them.
    """
    directory = local_files(path, revision, ("config.json",))
    local_files(path, revision, ("model.safetensors",), optional=True)
    shards = sorted(directory.glob("*.safetensors"))
    pickles = sorted(p for pattern in _PICKLES for p in directory.glob(pattern))
    if not shards and pickles:
        names = ", ".join(p.name for p in pickles)
        raise ValueError(_CONVERT.format(names=names, source=pickles[0], directory=directory))
    if not shards:
        raise FileNotFoundError(f"{directory} has no *.safetensors: give the directory or hub id of a whole head")
    check_tensor_files(directory)
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    return PublicHead(directory, read_config(directory), tensors)
