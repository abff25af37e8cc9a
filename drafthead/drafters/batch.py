"""A packed micro batch, as every draft model reads it: documents end to end, without padding.

A drafter's loss starts at some row of each document and runs to its end. Rows before that row give context only: for a
chat prompt of 4,000 tokens and a response of 500, an eighth of the tokens have rows. What only the
loss reads is kept for the teacher rows: those that predict a token which the target generated, or one after it. Two
documents of five and three tokens, P prompt and G generated, with loss rows from two tokens before the first G:

    token         0  1  2  3  4 | 5  6  7
                  P  P  P  P  G | P  G  G
    rows                2  3  4 | 5  6  7      rows = [2, 3, 4, 5, 6, 7], cu_rows = [0, 3, 6]
    teacher rows           0  1 | 2  3  4      of_row = [-1, 0, 1, 2, 3, 4]

Shapes: T tokens, R rows, Q teacher rows, S documents, N aux layers, H hidden, K draft positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

from drafthead.drafters.attention import Documents
from drafthead.losses.fused import Chunks, chunk_rows


@dataclass(frozen=True)
class Layout:
    """Documents of a packed batch and their rows.

    Attributes:
        cu_seqlens: (S + 1,) int32, where each document begins among the T tokens, then T.
        rows: (R,) int64, ascending token indices of the rows: the tail of each document.
        cu_rows: (S + 1,) int32, where each document begins among the R rows, then R.
        longest: most tokens of a document. Known on the host: asking a GPU for it would wait for all it has to do.
        most_rows: most rows of a document, known on the host too.
        roots: the rows that each of the K draft positions is computed for, (P_k,) int64, ascending, each among those of
            the position before; empty: all rows for every position.
    """

    cu_seqlens: Tensor
    rows: Tensor
    cu_rows: Tensor
    longest: int
    most_rows: int
    roots: tuple[Tensor, ...] = ()

    def at(self, k: int, per_row: Tensor) -> Tensor:
        """(P_k, ...) of (R, ...): of the rows that draft position k is computed for."""
        return per_row.index_select(0, self.roots[k]) if self.roots else per_row

    def counts(self, num_positions: int) -> tuple[int, ...]:
        """(K,) numbers of rows that the draft positions are computed for."""
        return tuple(map(len, self.roots)) or (len(self.rows),) * num_positions

    def documents(self, k: int) -> Documents:
        """What `draft_attention` reads of the documents for draft position k."""
        within = (self.roots[k], len(self.rows)) if self.roots and len(self.roots[k]) < len(self.rows) else None
        return self.cu_rows, self.cu_seqlens, (self.most_rows, self.longest), within


def tail_layout(lengths: Sequence[int], firsts: Sequence[int]) -> Layout:
    """Lay documents of these lengths end to end; rows of each start at its `firsts` entry (counted within it)."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    starts = cu_seqlens[:-1].tolist()
    rows = [torch.arange(s + f, s + n) for s, f, n in zip(starts, firsts, lengths, strict=True)]
    cu_rows = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
    return Layout(cu_seqlens.int(), torch.cat(rows), cu_rows.int(), max(lengths), max(map(len, rows)))


@dataclass(frozen=True)
class PackedBatch:
    """One micro batch.

    Attributes:
        layout: documents and rows of the batch.
        input_ids: (T,) int64.
        positions: (T,) int64 positions in the document, as the target had them.
        aux: (T, N * H), aux hidden states, layer ids ascending; as stored, or in a compute type.
        loss_mask: (R,) bool, rows whose token is learned: the target generated it, or its prompt is learned too.
        scored: (K, R) bool, rows that carry loss at each draft position, by the drafter's plan.
        of_row: (R,) int64, the teacher row of each row's token, -1 where it has none.
        last_hidden: (Q, H), input of the target's final norm.
        argmax: (Q,) int64, the target's most likely next token.
        lse: (Q,) float32, log-sum-exp of the target's logits over its full vocabulary.
        aux_scale: (T, N) float32, of each layer of `aux` where that is in e4m3.
        chunks: chunks in which the head computes the scored rows, once `prepared`.
    """

    layout: Layout
    input_ids: Tensor
    positions: Tensor
    aux: Tensor
    loss_mask: Tensor
    scored: Tensor
    of_row: Tensor
    last_hidden: Tensor
    argmax: Tensor
    lse: Tensor
    aux_scale: Tensor | None = None
    chunks: Chunks | None = None

    @property
    def row_ids(self) -> Tensor:
        """(R,) token ids of the rows."""
        return self.input_ids[self.layout.rows]

    def ahead(self, k: int) -> Tensor:
        """(P_0,) token ids k behind the roots; what wraps around lies past a document's end."""
        return self.layout.at(0, torch.roll(self.row_ids, -k))

    def computed(self, per_position: Tensor) -> Tensor:
        """(M,) of (K, R): of the rows computed for draft position 0, then of those for position 1, and so on."""
        return torch.cat([self.layout.at(k, per_row) for k, per_row in enumerate(per_position)])

    def spread(self, computed: Tensor) -> Tensor:
        """(K, R) of (M,), the reverse of `computed`, with -1 where a row is not computed."""
        per_position = computed.new_full(self.scored.shape, -1)
        for k, part in enumerate(computed.split(self.layout.counts(len(per_position)))):
            per_position[k, self.layout.roots[k] if self.layout.roots else slice(None)] = part
        return per_position

    def teachers(self, num_positions: int) -> Tensor:
        """(M,) teacher rows: draft position k at row r meets the teacher of row r + 1 + k; -1: no loss."""
        ahead = torch.stack([torch.roll(self.of_row, -1 - k) for k in range(num_positions)])
        # What wraps around lies past a document's end, and is not scored; nor is a position beyond those of training.
        scored = torch.nn.functional.pad(self.scored, (0, 0, 0, num_positions - len(self.scored)))
        return self.computed(torch.where(scored, ahead, -1))

    def to(self, device: torch.device, dtype: torch.dtype) -> "PackedBatch":
        """The batch on a device, its states in the compute type."""
        return self.on(device).cast(dtype)

    def on(self, device: torch.device) -> "PackedBatch":
        """The batch on a device; from page-locked memory the host does not wait."""
        return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), self)

    def prepared(self, num_positions: int, device_type: str, roots: tuple[Tensor, ...] = ()) -> "PackedBatch":
        """A batch on the host, with what the head would otherwise have to ask a device for.

        Args:
            num_positions: K, number of draft positions.
            device_type: type of the device that the head computes on.
            roots: roots of the layout.
        """
        batch = replace(self, layout=replace(self.layout, roots=roots))
        return replace(batch, chunks=chunk_rows(batch.teachers(num_positions), num_positions, device_type))

    def cast(self, dtype: torch.dtype) -> "PackedBatch":
        """The batch with its states in the compute type; e4m3 becomes bf16 first."""
        aux = self.aux
        if self.aux_scale is not None:
            aux = torch.empty(aux.shape, dtype=torch.bfloat16, device=aux.device)
            layers = self.aux_scale.shape[1]
            parts = zip(aux.chunk(layers, -1), self.aux.chunk(layers, -1), self.aux_scale.T, strict=True)
            for out, values, scale in parts:  # one by one: the float32 copy stays small
                out.copy_(dequantise(values, scale))
        return replace(self, aux=aux.to(dtype), last_hidden=self.last_hidden.to(dtype), aux_scale=None)

    def record_stream(self, stream: Any) -> None:
        """Memory of another stream is not given out again before this one has read it."""
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(stream), self)

    def pinned(self) -> "PackedBatch":
        """The batch in page-locked host memory."""
        return tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), self)


# torch's tree_map goes through their fields.
register_dataclass(Layout)
register_dataclass(PackedBatch)


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """(T, H) e4m3 and (T,) scales -> (T, H) bfloat16, which adds an error 16 times smaller than e4m3's own."""
    return values.float().mul_(scale[:, None]).to(torch.bfloat16)
