"""The frozen pieces of a target model, read without loading the model.

Training, harvesting and export need four facts of a target: its shape, its embedding, its final norm and
its lm_head. They are read by name from the safetensors shards, so a 120B target costs two tensors of
memory and no model class. What this gives up: targets that do more than norm and matmul after their last
block (biases, logit soft-capping, scaled logits) are refused. The alternative, `from_pretrained`, reads everything.

Shapes: T tokens, H hidden, V target vocabulary, L blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from drafthead.files import ForeignFileError, reading_external
from drafthead.target.files import AGAIN, INDEX, local_files
from drafthead.target.spec import TargetSpec, load_target_spec
from drafthead.target.tensors import EMBEDDING, HEAD, NORM, ONLY_FILE, check_output_layer, weight_map

SCORED_ROWS = 512  # whose logits `TargetHead.stats` holds at a time; of gpt-oss 412 MB
# Families whose norms multiply by 1 + weight; a test looks for them in transformers.
CENTRED_NORMS = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "minimax_m3_vl", "minimax_m3_vl_text", "qwen3_5", "qwen3_5_text",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "step3p5",
    "step3p7", "vaultgemma",
})  # fmt: skip


@dataclass(frozen=True)
class TargetPieces:
    """Frozen tensors of a target in the checkpoint's dtype, on the CPU.

    Attributes:
        spec: shape of the target.
        embed_tokens: (V, H) embedding of the target.
        final_norm: (H,) weight of the final norm; float32 where the checkpoint stores it less 1.
        lm_head: (V, H) output layer; the same tensor as embed_tokens when they are tied.
    """

    spec: TargetSpec
    embed_tokens: Tensor
    final_norm: Tensor
    lm_head: Tensor


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
    directory = local_files(path, revision, (INDEX,), optional=True)
    if not (directory / INDEX).is_file():
        directory = local_files(path, revision, (ONLY_FILE,))
    files = weight_map(directory)
    check_output_layer(path, {}, files)  # of a hub id they may have come just now

    def read(names: Sequence[str], *shape: int) -> Tensor:
        name = next((name for name in names if name in files), None)
        if name is None:
            raise ValueError(f"{path} has none of the tensors {', '.join(names)}; it has e.g. {sorted(files)[:3]}")
        file = local_files(path, revision, (files[name],)) / files[name]
        with reading_external(file, AGAIN), safe_open(file, framework="pt") as opened:
            tensor = opened.get_tensor(name)
        if tensor.shape != shape:
            stored = tuple(tensor.shape)
            raise ForeignFileError(f"{file} has {name} of shape {stored}, and config.json says {shape}. {AGAIN}")
        if tensor.itemsize < 2:  # its scale is a tensor of another name
            raise ForeignFileError(f"{file} has {name} in {tensor.dtype}: give a target where it is not quantised")
        return tensor

    embed_tokens = read(EMBEDDING, spec.vocab_size, spec.hidden_size)
    tied = spec.tie_word_embeddings
    if tied is None:  # transformers' default is to tie
        tied = files.keys().isdisjoint(HEAD)
    lm_head = embed_tokens if tied else read(HEAD, spec.vocab_size, spec.hidden_size)
    final_norm = read(NORM, spec.hidden_size)
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
        embeddings: (V, H) embedding of the target.
        final_norm: (H,) weight of the final norm.
        head_rows: (D, H) rows of lm_head for the draft vocabulary.
        rms_norm_eps: epsilon of the final norm.
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
            temperature: sampling temperature, above 0.
            normed: (Q, H) states from `normed`.
            lse: (Q,) log-sum-exp of the full vocabulary at temperature 1.
        """
        chunks, weight = [], self.head_rows.T.to(lse.dtype)  # rounding to bf16 would pass for what lies outside
        for rows, whole in zip(normed.split(SCORED_ROWS), lse.split(SCORED_ROWS), strict=True):
            logits = rows.to(whole.dtype) @ weight
            # Rounding may leave the part a little above the whole.
            outside = whole + (1 - (logits.logsumexp(-1) - whole).exp()).clamp_min(0).log()
            chunks.append(torch.logaddexp((logits / temperature).logsumexp(-1), outside / temperature))
        return torch.cat(chunks) if chunks else lse


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
        device: device that logits are computed on.
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
            hidden: (T, H) input of the final norm.
            chunk: number of tokens at a time.

        Returns:
            argmax (T,) int32 and log-sum-exp at temperature 1 (T,) float32, on the device of `hidden`.
        """
        argmax, lse = [], []
        for part in hidden.split(chunk):
            logits = self.logits(part)
            argmax.append(logits.argmax(-1).to(hidden.device, torch.int32))
            lse.append(logits.logsumexp(-1).to(hidden.device))
        return torch.cat(argmax), torch.cat(lse)
