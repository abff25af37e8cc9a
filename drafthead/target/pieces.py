"""The frozen pieces of a target model, read without loading the model.

Training, harvesting and export need four facts of a target: its shape, its embedding, its final norm and
its lm_head. They are read by name from the safetensors shards, so a 120B target costs two tensors of
memory and no model class. What this gives up: targets that do more than norm and matmul after their last
block (logit soft-capping, scaled logits) are refused. The alternative, `from_pretrained`, reads everything.

Shapes: T tokens, H hidden, V target vocabulary, L blocks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field
from safetensors import safe_open
from torch import Tensor

from drafthead.config import Recipe
from drafthead.files import ForeignFileError, foreign
from drafthead.target.files import AGAIN, INDEX, fingerprint_of, local_files, read_index
from drafthead.target.rope import head_rope

_EMBEDDING, _NORM = (
    tuple(f"{prefix}{name}.weight" for prefix in ("model.", "language_model.model.", "model.language_model.", ""))
    for name in ("embed_tokens", "norm")
)
SCORED_ROWS = 512  # whose logits `TargetHead.stats` holds at a time; of gpt-oss 412 MB
_HEAD = ("lm_head.weight", "language_model.lm_head.weight")
# Keys that scale or cap logits beyond lm_head(norm(h)).
_LOGITS = (
    "final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier",
    "logits_soft_cap", "dim_model_base",
)  # fmt: skip
# Families whose norms multiply by 1 + weight; a test looks for them in transformers.
CENTRED_NORMS = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "minimax_m3_vl", "minimax_m3_vl_text", "qwen3_5", "qwen3_5_text",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "step3p5",
    "step3p7", "vaultgemma",
})  # fmt: skip


_Count = Annotated[int, Field(gt=0, strict=True)]


class _Rotation(BaseModel):
    """What `head_rope` reads of a config.json."""

    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None


class TargetSpec(BaseModel, frozen=True):
    """What a target's config.json says about it.

    Attributes:
        name: the path or hub id as given.
        hidden_size: H.
        num_layers: L; boundary ids run from 0 (embeddings) to L (input of the final norm).
        vocab_size: V.
        rms_norm_eps: of the final norm.
        rope_parameters: of a head for it, in transformers' current form: rope_type, rope_theta, the type's own keys.
        max_position_embeddings: longest position the target was made for.
        tie_word_embeddings: whether lm_head is the embedding; None: config.json leaves it to the family.
        dtype: the checkpoint's dtype, by name.
        model_type: transformers' name of the architecture.
        fingerprint: hex digest of which target this is; see `target.files.fingerprint_of`.
    """

    name: str
    hidden_size: _Count
    num_layers: _Count = Field(validation_alias="num_hidden_layers")
    vocab_size: _Count
    rms_norm_eps: Annotated[float, Field(gt=0, strict=True)]
    rope_parameters: dict[str, Any]
    max_position_embeddings: _Count
    tie_word_embeddings: bool | None
    dtype: Literal["bfloat16", "float16", "float32"]
    model_type: str
    fingerprint: str


@dataclass(frozen=True)
class TargetPieces:
    """Frozen tensors of a target in the checkpoint's dtype, on the CPU.

    Attributes:
        spec: of the target.
        embed_tokens: (V, H).
        final_norm: (H,), what the normed state is multiplied with; float32 where the checkpoint has it less 1.
        lm_head: (V, H); the same tensor as embed_tokens when they are tied.
    """

    spec: TargetSpec
    embed_tokens: Tensor
    final_norm: Tensor
    lm_head: Tensor


def load_target_spec(path: str, revision: str | None = None) -> TargetSpec:
    """Read a target's shape and identity, as data: no code runs, and no more than 256 KiB per shard is read.

    Args:
        path: a directory, or a hub id whose files are cached or can be downloaded.
        revision: of a hub id.

    Raises:
        FileNotFoundError: there is no such directory, or it lacks a file (which is named).
        ValueError: config.json lacks a key, or describes an output layer this project does not compute.
    """
    file = local_files(path, revision, ("config.json",)) / "config.json"
    with foreign(file, AGAIN):
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        config |= config.get("text_config", {})  # multimodal checkpoints nest the language model
    for key in _LOGITS:
        if config.get(key) not in (None, 1, 1.0):
            raise ValueError(
                f"target {path} sets {key}={config[key]}: its logits are not lm_head(norm(h)), "
                "which is all that drafthead.target.pieces computes"
            )
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    given = {"name": path, "dtype": dtype, "tie_word_embeddings": config.get("tie_word_embeddings")}
    with foreign(file, f"Is it a decoder-only language model? {AGAIN}"):
        _Rotation.model_validate(config)
        spec = TargetSpec.model_validate(config | given | {"rope_parameters": {}, "fingerprint": ""})
    found = {"rope_parameters": head_rope(config, path), "fingerprint": fingerprint_of(path, revision)}
    return spec.model_copy(update=found)


def recipe_spec(recipe: Recipe) -> TargetSpec:
    """The spec of a recipe's target, which has the recipe's aux layers.

    Raises:
        FileNotFoundError, ValueError: as `load_target_spec`.
        ValueError: an aux layer lies beyond the target.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    return spec


def check_jitter(recipe: Recipe, spec: TargetSpec) -> None:
    """Refuse positions that the target does not have.

    Raises:
        ValueError: train.position_jitter lies beyond the target.
    """
    longest, jitter = recipe.engine.max_model_len, recipe.train.position_jitter
    if jitter and longest + jitter > spec.max_position_embeddings:
        raise ValueError(
            f"train.position_jitter {jitter} behind engine.max_model_len {longest} tokens exceeds the target's "
            f"{spec.max_position_embeddings} positions; set it lower"
        )


def model_config(recipe: Recipe) -> Any:
    """The target's config.json as transformers reads it.

    Raises:
        FileNotFoundError: it is not here.
        ForeignFileError: transformers refuses it.
    """
    from transformers import AutoConfig

    directory = local_files(recipe.target_path, recipe.target.revision, ("config.json",))
    with foreign(directory / "config.json", AGAIN):
        return AutoConfig.from_pretrained(directory, trust_remote_code=recipe.target.trust_remote_code)


def target_identity(recipe: Recipe, spec: TargetSpec) -> dict[str, str | None]:
    """Which target an artifact was made from or for; the fingerprint is what consumers compare."""
    return {"path": recipe.target.path, "revision": recipe.target.revision, "fingerprint": spec.fingerprint}


def target_names(found: Mapping[str, Any], recipe: Recipe, spec: TargetSpec) -> tuple[str, str]:
    """The target of an artifact and the recipe's as a person reads them: equal where the fingerprints are.

    Args:
        found: from `target_identity`, when the artifact was made.
        recipe: of today.
        spec: of the recipe's target.
    """
    wanted = target_identity(recipe, spec)
    same = found["fingerprint"] == wanted["fingerprint"]  # a directory may have moved
    return _name_target(wanted if same else found), _name_target(wanted)


def _name_target(target: Mapping[str, Any]) -> str:
    """A target in words: what the recipe calls it, and the start of its fingerprint."""
    at = f" at revision {target['revision']}" if target["revision"] else ""
    return f"{target['path']}{at} (fingerprint {target['fingerprint'][:12]})"


def check_aux_layer_ids(spec: TargetSpec, aux_layer_ids: Sequence[int]) -> None:
    """Refuse boundaries that the target does not have.

    Raises:
        ValueError: an aux layer id is larger than L.
    """
    beyond = [layer_id for layer_id in aux_layer_ids if layer_id > spec.num_layers]
    if beyond:
        raise ValueError(
            f"target.aux_layer_ids {list(aux_layer_ids)}: {beyond} exceed the {spec.num_layers} layers of {spec.name}; "
            f"use ids from 0 (embeddings) to {spec.num_layers} (input of the final norm)"
        )


def captured_ids(spec: TargetSpec, aux_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The boundaries a harvest reads, ascending: the aux layers, and L once, which argmax and lse come from."""
    return tuple(sorted({*aux_layer_ids, spec.num_layers}))


def compute_dtype(spec: TargetSpec, dtype: str) -> torch.dtype:
    """The torch dtype of a recipe's target.dtype ("auto": the checkpoint's)."""
    return getattr(torch, spec.dtype if dtype == "auto" else dtype)


def load_pieces(path: str, revision: str | None = None) -> TargetPieces:
    """Read embedding, final norm and lm_head by name from the safetensors shards.

    Raises:
        FileNotFoundError: the checkpoint or one of its shards is missing.
        ValueError: the checkpoint has no tensor of a known name.
    """
    spec = load_target_spec(path, revision)
    weight_map = _weight_map(path, revision)

    def read(names: Sequence[str], *shape: int) -> Tensor:
        name = next((name for name in names if name in weight_map), None)
        if name is None:
            raise ValueError(f"{path} has none of the tensors {', '.join(names)}; it has e.g. {sorted(weight_map)[:3]}")
        file = local_files(path, revision, (weight_map[name],)) / weight_map[name]
        with foreign(file, AGAIN), safe_open(file, framework="pt") as opened:
            tensor = opened.get_tensor(name)
        if tensor.shape != shape:
            found, wanted = tuple(tensor.shape), f"config.json says {shape}"
            raise ForeignFileError(f"{file} has {name} of shape {found}, and {wanted}. {AGAIN}")
        if tensor.itemsize < 2:  # its scale is a tensor of another name
            raise ForeignFileError(f"{file} has {name} in {tensor.dtype}: give a target where it is not quantised")
        return tensor

    embed_tokens = read(_EMBEDDING, spec.vocab_size, spec.hidden_size)
    tied = spec.tie_word_embeddings
    if tied is None:  # transformers' default is to tie
        tied = weight_map.keys().isdisjoint(_HEAD)
    lm_head = embed_tokens if tied else read(_HEAD, spec.vocab_size, spec.hidden_size)
    final_norm = read(_NORM, spec.hidden_size)
    if spec.model_type in CENTRED_NORMS:
        final_norm = 1 + final_norm.float()
    return TargetPieces(spec, embed_tokens, final_norm, lm_head)


def final_normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The target's final norm of (T, H), in float32 or wider."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight


@dataclass(frozen=True)
class FrozenTarget:
    """What training needs of the target, in the compute type and on the device.

    Attributes:
        embeddings: (V, H).
        final_norm: (H,).
        head_rows: (D, H) rows of lm_head for the draft vocabulary.
        rms_norm_eps: of the final norm.
        target_ids: (D,) target id of every draft id.
    """

    embeddings: Tensor
    final_norm: Tensor
    head_rows: Tensor
    rms_norm_eps: float
    target_ids: Tensor

    def normed(self, last_hidden: Tensor) -> Tensor:
        """What lm_head is applied to, (T, H), from the input of the final norm."""
        return final_normed(last_hidden, self.final_norm, self.rms_norm_eps).to(self.head_rows.dtype)

    def lse_at(self, temperature: float, normed: Tensor, lse: Tensor) -> Tensor:
        """(Q,) log-sum-exp over the full vocabulary of the logits divided by a temperature, from that at temperature 1.

        Exact over the draft vocabulary; what lies outside of it counts as one token: the most that its mass can
        become below temperature 1, the least above it.

        Args:
            temperature: above 0.
            normed: (Q, H), of `normed`.
            lse: (Q,) at temperature 1.
        """
        found, weight = [], self.head_rows.T.to(lse.dtype)  # rounding to bf16 would pass for what lies outside
        for rows, whole in zip(normed.split(SCORED_ROWS), lse.split(SCORED_ROWS), strict=True):
            logits = rows.to(whole.dtype) @ weight
            # Rounding may leave the part a little above the whole.
            outside = whole + (1 - (logits.logsumexp(-1) - whole).exp()).clamp_min(0).log()
            found.append(torch.logaddexp((logits / temperature).logsumexp(-1), outside / temperature))
        return torch.cat(found) if found else lse


def frozen_target(pieces: TargetPieces, target_ids: Tensor, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
    """The target's tensors that training reads; `target_ids` (D,) are those of the draft vocabulary."""
    return FrozenTarget(
        embeddings=pieces.embed_tokens.to(device, dtype),
        final_norm=pieces.final_norm.to(device, torch.float32),
        head_rows=pieces.lm_head[target_ids].to(device, dtype),
        rms_norm_eps=pieces.spec.rms_norm_eps,
        target_ids=target_ids.to(device),
    )


class TargetHead:
    """Final norm and lm_head: logits from the input of the final norm.

    The normed state is rounded to the target's compute dtype, where the engine rounds it; products are
    accumulated and returned in float32. Engines return logits in the compute dtype: bf16 would put an
    error of up to 0.06 on a logit of 16, and with it on every stored log-sum-exp.

    Attributes:
        device: where logits are computed.
    """

    def __init__(self, pieces: TargetPieces, dtype: torch.dtype, device: torch.device | str = "cpu"):
        device = torch.device(device)
        # CUDA multiplies bf16 into float32 directly; elsewhere the weights are widened once, for the same sums.
        self._native = device.type == "cuda" and dtype != torch.float32
        self._norm = pieces.final_norm.to(device, torch.float32)
        self.device = self._norm.device
        self._lm_head = pieces.lm_head.to(device, dtype).to(dtype if self._native else torch.float32)
        self._eps = pieces.spec.rms_norm_eps
        self._dtype = dtype

    @classmethod
    def load(
        cls, path: str, revision: str | None = None, dtype: str = "auto", device: torch.device | str = "cpu"
    ) -> "TargetHead":
        """Read a target's pieces and keep what logits need on `device`."""
        pieces = load_pieces(path, revision)
        return cls(pieces, compute_dtype(pieces.spec, dtype), device)

    def logits(self, hidden: Tensor) -> Tensor:
        """(T, H) inputs of the final norm -> (T, V) float32 logits, on the device of the weights."""
        rounded = final_normed(hidden.to(self.device, torch.float32), self._norm, self._eps).to(self._dtype)
        if self._native:
            return torch.mm(rounded, self._lm_head.t(), out_dtype=torch.float32)
        return rounded.float() @ self._lm_head.t()

    def stats(self, hidden: Tensor, chunk: int = SCORED_ROWS) -> tuple[Tensor, Tensor]:
        """What training keeps of the full distribution.

        Args:
            hidden: (T, H), input of the final norm.
            chunk: tokens at a time.

        Returns:
            argmax (T,) int32 and log-sum-exp at temperature 1 (T,) float32, on the device of `hidden`.
        """
        argmax, lse = [], []
        for part in hidden.split(chunk):
            logits = self.logits(part)
            argmax.append(logits.argmax(-1).to(hidden.device, torch.int32))
            lse.append(logits.logsumexp(-1).to(hidden.device))
        return torch.cat(argmax), torch.cat(lse)


def _weight_map(path: str, revision: str | None) -> dict[str, str]:
    """Tensor name -> file name."""
    index = local_files(path, revision, (INDEX,), optional=True) / INDEX
    if index.exists():
        return read_index(index)
    file = local_files(path, revision, ("model.safetensors",)) / "model.safetensors"
    with foreign(file, AGAIN), safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file.name)
