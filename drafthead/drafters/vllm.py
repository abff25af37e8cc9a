"""The files of a head as vLLM 0.32 reads them: what all drafters share. Their own keys stand beside each drafter.

Most keys that decide what a head computes leave no trace in the shapes of its tensors: a head served with another norm
than it was trained with loads without an error and drafts garbage. So a drafter's `plain_config` writes every key, its
`served_values` reads every key as vLLM does, and `check_config` compares the two.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor

from drafthead.artifacts import describe_difference, read_json
from drafthead.drafters.base import DraftShape, draft_shape, parameter_shapes
from drafthead.drafters.registry import drafter_of, parse_head
from drafthead.files import reading_external
from drafthead.target.pieces import TargetPieces
from drafthead.target.rope import imported_rope, rope_parameters_of
from drafthead.target.spec import TargetSpec

Config = dict[str, Any]
# Sizes that have one name in the head section and in config.json.
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
# Those that an export writes and an import reads back.
_ALIKE = (*_SIZES, "draft_vocab_size", "sliding_window")
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
WINDOWED = "sliding_attention"
_MEASURE = "such a head is measured as it is, as a method of eval.methods with `head: ITS_DIRECTORY`"
log = logging.getLogger(__name__)
_AGAIN = "It may be damaged or cut short: fetch the head again"


class HeadFiles(ABC):
    """config.json and tensors of one kind of head, in both directions.

    Attributes:
        METHOD: method of --speculative-config.
        ALGORITHM: name of the drafter in messages.
        ARCHITECTURES: names of the drafter's architecture in a config.json.
        GPU_ONLY: whether vLLM serves the drafter on GPUs only.
        SWAPPABLE: whether its weights were exchanged in a running engine, see drafthead/adapting/endpoint.py.
        UNREAD: names of tensors that vLLM's loader passes over where the head does not use them.
        TYPE: `type` of the head section that describes the drafter.
        OWN: fields of the head section which not all drafters have, and the key of `served_values` for each.
    """

    METHOD: str
    ALGORITHM: str
    ARCHITECTURES: tuple[str, ...]
    GPU_ONLY = False
    SWAPPABLE = False
    UNREAD = re.compile(r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
    TYPE: str
    OWN: ClassVar[dict[str, str]]

    def speculative_config(self, directory: Path | str, num_speculative_tokens: int) -> dict[str, Any]:
        """vLLM's --speculative-config for an exported head of the plain layout."""
        return {"method": self.METHOD, "model": str(directory), "num_speculative_tokens": num_speculative_tokens}

    @abstractmethod
    def plain_config(self, shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
        """config.json of the plain layout.

        Args:
            shape: shape of the head, with the positions and the rotation to be served.
            aux_layer_ids: boundary indices of the aux layers, ascending.
            dtype: type of the weights, by torch's name.
        """

    def speculators_config(self, config: Config, num_speculative_tokens: int, verifier: Config) -> Config:
        """config.json of the speculators layout, from the plain one.

        Args:
            config: config.json in the plain layout.
            num_speculative_tokens: K to be served unless the user says otherwise.
            verifier: the target: `name_or_path`, a hub id or the absolute path of a directory, and `architectures`.

        Raises:
            ValueError: heads of this kind are written in the plain layout only.
        """
        raise ValueError(f"export.format speculators: {self.ALGORITHM} heads have one layout; set it to vllm")

    def plain_form(self, config: Config) -> Config:
        """The plain config that vLLM makes of a config.json, its defaults included; a plain one as it is."""
        return config

    @abstractmethod
    def served_values(self, config: Config) -> Config:
        """What vLLM makes of a config.json of either layout: its keys that decide what a head computes.

        Raises:
            KeyError: a key without a default is missing.
            ValueError: it describes another algorithm, or what is not computed here.
        """

    @abstractmethod
    def boundaries(self, served: Config, num_layers: int, layer_ids_are: str | None) -> list[int]:
        """The ascending boundaries that a public head reads, from `served_values`.

        Args:
            served: `served_values` of the head.
            num_layers: L, number of layers of the target.
            layer_ids_are: "boundaries", "blocks" (counted from 0), or None when the ids leave no doubt.

        Raises:
            ValueError: its layer ids are unclear.
        """

    def describe(
        self, config: Config, tensors: Mapping[str, Tensor], spec: TargetSpec, layer_ids_are: str | None
    ) -> tuple[DraftShape, tuple[int, ...]]:
        """The shape of a public head and the ascending boundaries that it reads.

        Args:
            config: config.json of either layout; defaults are those that vLLM applies.
            tensors: tensors by checkpoint names; the width of fc tells the number of aux layers.
            spec: shape of the target.
            layer_ids_are: how the ids are counted, as for `boundaries`.

        Raises:
            ValueError: the head is not for this target, uses what is not computed here, or its layer ids are unclear.
        """
        try:
            served, width = self.served_values(config), tensors["fc.weight"].shape[1]
        except KeyError as error:
            raise ValueError(f"the head has no key {error}: is it an {self.ALGORITHM} head?") from error
        ids = self.boundaries(served, spec.num_layers, layer_ids_are)
        if len(ids) * spec.hidden_size != width:
            raise ValueError(
                f"config.json names aux layers {ids}, but fc reads {width / spec.hidden_size:g} states of the target's "
                f"hidden size {spec.hidden_size}: give the target that this head was trained for"
            )
        sizes = {"hidden_size": spec.hidden_size, "target_hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size}
        for key, expected in {**sizes, **_FIXED}.items():
            if served[key] != expected:
                raise ValueError(f"the head has {key}={served[key]!r}; a head for {spec.name} has {expected!r}")
        fields = {"num_layers": "num_hidden_layers", **{name: name for name in _ALIKE}, **self.OWN}
        head = parse_head({"type": self.TYPE, **{field: served[key] for field, key in fields.items()}})
        # A head made elsewhere rotates and norms as its own config says, whatever the target's does.
        head_values = {key: served[key] for key in ("rms_norm_eps", "max_position_embeddings")}
        rope = imported_rope(self.plain_form(config))
        return replace(draft_shape(head, spec, ids), **head_values, rope_parameters=rope), tuple(ids)

    def exported_tensors(
        self, weights: dict[str, Tensor], shape: DraftShape, dtype: str, layout: str = "vllm"
    ) -> dict[str, Tensor]:
        """A checkpoint's tensors as a file of that dtype holds them: parameters rounded, maps as they are.

        d2t and t2d are left out where the head proposes the target's whole vocabulary: vLLM refuses them there.
        """
        whole = shape.head.draft_vocab_size == shape.vocab_size
        exported = {name: tensor for name, tensor in weights.items() if not (whole and name in ("d2t", "t2d"))}
        return {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in exported.items()}

    def checkpoint_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A file's tensors, of any layout, under the names of a checkpoint and without copies of the target.

        Raises:
            ValueError: a tensor is there twice.
        """
        plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        if len(plain) != len(tensors):
            raise ValueError("the head holds the same tensor with and without the prefix `model.`")
        return plain


def decoder_config(shape: DraftShape, dtype: str) -> Config:
    """Keys of config.json that every draft model of dense Llama blocks has.

    Args:
        shape: shape of the head, with the positions and the rotation to be served.
        dtype: type of the weights, by torch's name.
    """
    return {
        "dtype": dtype,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.head.num_layers,
        **{name: getattr(shape.head, name) for name in _SIZES},
        **_FIXED,
        "bos_token_id": None,
        "eos_token_id": None,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.head.draft_vocab_size,
        "tie_word_embeddings": False,
        # Less than what is served makes vLLM stop drafting for a whole batch once one request passes it.
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": shape.rope_parameters,
        "sliding_window": shape.head.sliding_window,
        "use_sliding_window": shape.head.sliding_window is not None,  # without it a Qwen3 config forgets the window
        "layer_types": [WINDOWED if shape.head.sliding_window else "full_attention"] * shape.head.num_layers,
    }


def served_decoder(config: Config) -> Config:
    """What vLLM makes of the keys of `decoder_config` in a plain config.json, its defaults included.

    Raises:
        ValueError: logits are scaled, or layers differ.
    """
    refuse_other(config, logit_scale=1.0)
    size, heads, vocab_size = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]
    return {
        "hidden_size": size,
        "target_hidden_size": config.get("target_hidden_size") or size,
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or size // heads,
        **{key: config.get(key) or value for key, value in _FIXED.items()},
        "rms_norm_eps": config["rms_norm_eps"],
        "vocab_size": vocab_size,
        "draft_vocab_size": config.get("draft_vocab_size") or vocab_size,
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_parameters": rope_parameters_of(config),
        "sliding_window": _served_window(config),
    }


def refuse_other(config: Config, **supported: object) -> None:
    """Refuse a head with another value of a key that leaves no trace in its tensors; absent is the supported one.

    Raises:
        ValueError: naming the key and both values.
    """
    for key, value in supported.items():
        if (stated := config.get(key, value)) != value:
            raise ValueError(f"the head has {key}={stated}, supported is {value}: {_MEASURE}")


def _served_window(config: Config) -> int | None:
    """Tokens that the layers attend to; None: all. Only `layer_types` decides whether a window is used.

    Raises:
        ValueError: layers differ.
    """
    kinds = config.get("layer_types") or []
    if 0 < kinds.count(WINDOWED) < len(kinds):
        raise ValueError(f"the head's layers differ (layer_types {kinds}); supported are heads whose layers are alike")
    return config["sliding_window"] if WINDOWED in kinds else None


def check_config(config: Config, shape: DraftShape, aux_layer_ids: tuple[int, ...], positions: int) -> None:
    """Refuse a config.json that vLLM would read differently from how the head was trained.

    Args:
        config: config.json of either layout, or what an engine made of it.
        shape: shape of the trained head.
        aux_layer_ids: boundaries of the target that the head was trained on.
        positions: number of positions that must be servable.

    Raises:
        ValueError: naming every key that differs, with the served and the trained value.
    """
    files = drafter_of(shape.head).vllm
    plain, served = files.plain_config(shape, aux_layer_ids, "bfloat16"), files.served_values(config)
    nested = {f"{outer}.{key}": v for outer, of in plain.items() if isinstance(of, dict) for key, v in of.items()}
    trained = {key: {**plain, **nested}.get(key) for key in served}
    trained["rope_parameters"] = served_decoder(plain)["rope_parameters"]
    trained["max_position_embeddings"] = max(served["max_position_embeddings"], positions)
    if served != trained:
        raise ValueError(
            f"vLLM would not serve the head that was trained at {positions} positions (engine.max_model_len); found in "
            f"config.json, wanted:\n{describe_difference(served, trained)}"
        )


def expected_shapes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint."""
    return {**parameter_shapes(shape), "d2t": (shape.head.draft_vocab_size,), "t2d": (shape.vocab_size,)}


def check_tensors(weights: dict[str, Tensor], shape: DraftShape) -> None:
    """Compare a checkpoint's tensors with those of a head.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape, not finite, or d2t and t2d disagree.
    """
    expected = expected_shapes(shape)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = [describe_difference(shapes, expected)] if shapes != expected else []
    problems += [f"  {name}: has values that are not finite" for name, t in weights.items() if not t.isfinite().all()]
    if not problems and not torch.equal(_target_ids(weights["d2t"]), weights["t2d"].nonzero()[:, 0]):
        problems = ["  d2t maps to other target tokens than those of t2d"]
    if problems:
        raise ValueError("the tensors are not those of the head (shapes):\n" + "\n".join(problems))


def completed(tensors: dict[str, Tensor], shape: DraftShape, pieces: TargetPieces) -> dict[str, Tensor]:
    """A public head's tensors as training has them: in float32, named apart, the draft vocabulary ascending, and with
    what the file leaves to the target (lm_head, the maps of a whole vocabulary).

    Args:
        tensors: tensors by checkpoint names, of any floating type; fused projections and any order of the draft
            vocabulary are taken, as vLLM takes them.
        shape: shape of the head.
        pieces: tensors of the target; its embedding is the only one that a head can have here.

    Raises:
        ValueError: the head has an embedding of its own, a pruned vocabulary without d2t, or a d2t that is no map.
    """
    vllm, parameters = drafter_of(shape.head).vllm, expected_shapes(shape)
    split = _split(tensors, shape)
    tensors = {name: t for name, t in split.items() if name in parameters or not vllm.UNREAD.match(name)}
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and not _same_but_for_rounding(embedding, pieces.embed_tokens):
        raise ValueError(
            "the head has an embedding of its own, which differs from its target's by more than rounding; vLLM serves "
            f"it, training here does not: {_MEASURE}"
        )
    if "d2t" not in tensors and shape.head.draft_vocab_size == shape.vocab_size:
        tensors["d2t"] = torch.zeros(shape.vocab_size, dtype=torch.long)
    if "d2t" not in tensors:
        sizes = f"{shape.head.draft_vocab_size} of {shape.vocab_size}"
        raise ValueError(f"the head proposes {sizes} tokens and has no d2t to say which")
    ids, order = _mapped_ids(tensors["d2t"], tensors.get("t2d"), shape.vocab_size).sort()
    for name in drafter_of(shape.head).MODULE.draft_rows:  # one row per token, in the order of d2t
        if name in tensors and len(tensors[name]) == len(order):
            tensors[name] = tensors[name][order]
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    if "lm_head.weight" not in tensors:  # tied to the target's, or left out because it is
        tensors["lm_head.weight"] = pieces.lm_head[ids]
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def _split(tensors: dict[str, Tensor], shape: DraftShape) -> dict[str, Tensor]:
    """Fused projections, which vLLM's loader takes as well, as the parts that they are made of."""
    head = shape.head
    query, kv = (n * head.head_dim for n in (head.num_attention_heads, head.num_key_value_heads))
    fused = {
        "qkv_proj": {"q_proj": query, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": head.intermediate_size, "up_proj": head.intermediate_size},
    }
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = next((parts for part, parts in fused.items() if f".{part}." in name), {})
        if not parts or len(tensor) != sum(parts.values()):
            split[name] = tensor
            continue
        module, _, kind = name.rpartition(".")
        for part, rows in zip(parts, tensor.split(list(parts.values())), strict=True):
            split[f"{module.rpartition('.')[0]}.{part}.{kind}"] = rows
    return split


def _same_but_for_rounding(mine: Tensor, target: Tensor) -> bool:
    """Whether both can be copies of one tensor, each rounded to its own type and perhaps by way of float16.

    Of float16 values below 6e-5 are rounded to a multiple of 6e-8.
    """
    if mine.shape != target.shape:
        return False
    types = (mine.dtype, target.dtype)
    rounding = 0.0 if types[0] == types[1] else sum(torch.finfo(dtype).eps / 2 for dtype in types)
    spacing = 2.0**-24
    rows = zip(mine.split(4096), target.split(4096), strict=True)  # float32 copies of an embedding take gigabytes
    return all(torch.allclose(a.float(), b.float(), rtol=rounding, atol=spacing) for a, b in rows)


def _mapped_ids(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> Tensor:
    """(D,) target ids of a public head's d2t, in its order. It holds offsets, unless the file itself proves that it
    holds ids: taken as offsets they lead to no map, or not to the tokens of t2d, and taken as ids they do.

    Raises:
        ValueError: it is no map either way.
    """
    ids, mapped = _whole_numbers(d2t), _target_ids(d2t)

    def is_map(candidate: Tensor) -> bool:
        within = len(candidate) == 0 or (int(candidate.min()) >= 0 and int(candidate.max()) < vocab_size)
        return within and len(candidate.unique()) == len(candidate)

    def is_of_t2d(candidate: Tensor) -> bool:
        return t2d is not None and torch.equal(candidate.sort().values, t2d.nonzero()[:, 0])

    if is_map(ids) and (not is_map(mapped) or (is_of_t2d(ids) and not is_of_t2d(mapped))):
        log.warning("d2t of the head holds ids where engines read offsets, as the rest of the file shows: taken as ids")
        return ids
    _target_ids(d2t, vocab_size)
    if not is_map(mapped):
        raise ValueError(
            f"d2t of the head leads to token {int(mapped.mode().values)} from several draft ids; fetch the head again"
        )
    return mapped


def _whole_numbers(d2t: Tensor) -> Tensor:
    """(D,) int64, of whatever type that holds whole numbers of this size exactly."""
    if d2t.is_floating_point() and len(d2t):
        exact = 2 / torch.finfo(d2t.dtype).eps
        if not bool((d2t == d2t.round()).all()) or float(d2t.abs().max()) > exact:
            raise ValueError(f"d2t of the head is of {d2t.dtype}, which cannot hold its offsets; fetch the head again")
    return d2t.long()


def _target_ids(d2t: Tensor, vocab_size: int | None = None) -> Tensor:
    """(D,) offsets -> (D,) target ids, which lie within the vocabulary where it is given."""
    ids = _whole_numbers(d2t) + torch.arange(len(d2t))
    if vocab_size is not None and len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise ValueError(
            f"d2t of the head leads to the target's tokens {int(ids.min())} to {int(ids.max())}, but there are "
            f"{vocab_size}: it is damaged, was made for another target, or holds ids instead of offsets"
        )
    return ids


def check_tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor of a head's safetensors files, from their headers.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is cut short or damaged.
    """
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with reading_external(path, _AGAIN), safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    if not files:
        raise FileNotFoundError(
            f"{directory} has no *.safetensors: give the directory or hub id of a whole head; one that the hub has as "
            "a pickle is converted once, see docs/export.md, Heads made elsewhere"
        )
    return files


def check_files(directory: Path, spec: TargetSpec) -> None:
    """Refuse a head that was made for another target, or whose files are damaged, before an engine starts.

    Engines find the same defects, after their start and at the end of a hundred lines of another program's stack.

    Raises:
        ValueError: naming what does not fit and both values.
    """
    config, files = read_json(directory / "config.json"), check_tensor_files(directory)
    with reading_external(directory / "config.json", _AGAIN):
        plain = config | config.get("transformer_layer_config", {})  # whatever the algorithm
    hidden = plain.get("target_hidden_size") or plain.get("hidden_size")
    stated = {"hidden_size": hidden, "vocab_size": plain.get("vocab_size")}
    expected = {key: value and getattr(spec, key) for key, value in stated.items()}  # what is not stated cannot differ
    if stated != expected:
        raise ValueError(
            f"{directory} is a head for another target than {spec.name}; give the head that was made for target.path:\n"
            + describe_difference(stated, expected)
        )
    if "d2t" in files:
        with safe_open(files["d2t"], framework="pt") as file:
            _target_ids(file.get_tensor("d2t"), spec.vocab_size)
