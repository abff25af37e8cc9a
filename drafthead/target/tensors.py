"""Which tensors of a checkpoint are embedding, final norm and lm_head, and that nothing else makes its logits.

Names alone are read: from the index, or from the header of the only file.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drafthead.files import reading_external
from drafthead.target.files import AGAIN, INDEX, read_index

EMBEDDING, NORM = (
    tuple(f"{prefix}{name}.weight" for prefix in ("model.", "language_model.model.", "model.language_model.", ""))
    for name in ("embed_tokens", "norm")
)
HEAD = ("lm_head.weight", "language_model.lm_head.weight")
ONLY_FILE = "model.safetensors"  # of a checkpoint without an index
_LANGUAGE_MODEL = re.compile(r"(language_model\.model|model\.language_model|language_model|model)\.")
# Parts that come before the last boundary, or that do not run: layers, what reads images and sound, MTP.
_ELSEWHERE = re.compile(
    r"(layers\.|vis|vit|image|video|audio|speech|multi_?modal|mm_|projector|resampler|merger|mtp|rotary_emb\.inv_freq$)"
)
# Keys of config.json about logits, and among them those about other logits than lm_head's.
_LOGITS = re.compile(r"logit|soft_?cap|lm_head|output_mult|^dim_model_base$")
_OTHER_LOGITS = re.compile(r"router|attn|attention|gate|keep|^tie|init|^output_\w*logits$")
_NEUTRAL = (None, False, 1)


def weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where neither an index nor a whole checkpoint is here."""
    index, file = directory / INDEX, directory / ONLY_FILE
    if index.is_file():
        return read_index(index)
    if not file.is_file():
        return {}
    with reading_external(file, AGAIN), safe_open(file, framework="numpy") as opened:
        return dict.fromkeys(opened.keys(), file.name)


def check_output_layer(path: str, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a target whose logits are not lm_head(norm(h)), by what is there and not read here.

    A bias of the norm or of lm_head, a scale of quantised weights, a second norm, a factor of the logits: whatever the
    family, each has its tensor beside the layers, or its key.

    Args:
        path: path of the target, for the error message.
        config: config.json of its language model.
        names: names of the target's tensors, as far as they are here.

    Raises:
        ValueError: naming the keys or tensors.
    """
    about = [key for key in config if _LOGITS.search(key) and not _OTHER_LOGITS.search(key)]
    unread = [f"{key}={config[key]}" for key in about if config[key] is True or config[key] not in _NEUTRAL]
    unread = [key for key in unread if key != f"dim_model_base={config.get('hidden_size')}"]  # a factor of 1
    read = {*EMBEDDING, *NORM, *HEAD}
    unread += sorted(name for name in names if name not in read and not _ELSEWHERE.match(_within(name)))
    if unread:
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        raise ValueError(
            f"target {path} has {', '.join(unread[:3])}{more}: its logits are not lm_head(norm(h)), which is all that "
            "is computed here (drafthead/target/tensors.py); give another target.path"
        )


def _within(name: str) -> str:
    """A tensor's name without the language model's prefix."""
    return _LANGUAGE_MODEL.sub("", name, count=1) if _LANGUAGE_MODEL.match(name) else name
