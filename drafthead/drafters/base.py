"""What a draft model is to the rest of the project: four questions that data, training, export and evaluation ask.

    loss_rows  which rows can carry loss at which draft position, and `trained_rows` which do (packing, the loss)
    MODULE     the class of its module, which `from_target` starts from the target (training)
    states     of that module: what the language-model head is applied to; `head_rows` adds the teacher row of each
               (the loss, validation, export checks)
    vllm       config.json and tensors as vLLM reads them, both directions (export, import, evaluation)

A drafter is a folder beside this file and its lines in `drafters.registry`. The loss is outside: `losses` knows rows
and teachers, and no drafter. A root is a token whose state is known while the next token is known too: from root t the
K drafts propose the tokens t+2 .. t+1+K.

Shapes: T tokens, R rows of a packed batch (see drafters.batch), K draft positions, H hidden, N aux layers, D draft
vocabulary, V target vocabulary.
"""

import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from drafthead.drafters.batch import PackedBatch
from drafthead.drafters.config import HeadConfig
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.losses.fused import HeadRows
from drafthead.target.pieces import TargetPieces
from drafthead.target.spec import TargetSpec

if TYPE_CHECKING:
    from drafthead.drafters.vllm import HeadFiles


@dataclass(frozen=True)
class DraftShape:
    """Everything that determines a draft model's parameters and arithmetic.

    Attributes:
        head: head section of the recipe.
        hidden_size: H, hidden size of the target.
        vocab_size: V, vocabulary size of the target.
        num_aux_layers: N, number of aux layers.
        rms_norm_eps: epsilon of the target's RMS norms.
        rope_parameters: parameters of the target's rotation, as in its config.json.
        max_position_embeddings: longest position of the target.
    """

    head: HeadConfig
    hidden_size: int
    vocab_size: int
    num_aux_layers: int
    rms_norm_eps: float
    rope_parameters: dict
    max_position_embeddings: int


def draft_shape(head: HeadConfig, spec: TargetSpec, layer_ids: Sequence[int]) -> DraftShape:
    """The shape of a head for a target; with its vocabulary chosen by coverage and not known yet, the whole one.

    Raises:
        ValueError: the head has tokens that the target does not have.
    """
    head.check_vocabulary(spec.vocab_size)
    sized = head if head.draft_vocab_size else head.sized(spec.vocab_size)
    return DraftShape(
        sized, spec.hidden_size, spec.vocab_size, len(layer_ids), spec.rms_norm_eps, spec.rope_parameters,
        spec.max_position_embeddings,
    )  # fmt: skip


_FURTHER_BLOCK = re.compile(r"layers\.[1-9]")
_NEARLY_ALL = 0.9  # of the rows: computing fewer pays for selecting them


class DraftModule(nn.Module, ABC):
    """The trainable part. Parameter names are those of the exported file, the embedding is the target's and frozen."""

    draft_rows: ClassVar[tuple[str, ...]] = ("lm_head.weight",)  # parameters with a row per token of its vocabulary
    recompute: bool = False  # keep less for the backward pass and compute it again
    head: Any  # the recipe's section, of the drafter's own class
    lm_head: nn.Linear
    fc: nn.Linear  # reads the aux hidden states

    def __init__(self, shape: DraftShape):
        super().__init__()
        self.shape, self.head = shape, shape.head

    @property
    def head_weight(self) -> Tensor:
        """(D, n) what the states of `head_rows` are multiplied with."""
        return self.lm_head.weight

    @abstractmethod
    def states(self, batch: PackedBatch, embeddings: Tensor, num_positions: int) -> tuple[Tensor, Tensor | None]:
        """(M, n) what `head_weight` is applied to: of the rows computed for draft position 0, then for position 1, ...;
        and (M,) `own_loss` of `HeadRows`.

        Not `forward`: ZeRO-3 looks for tensors in the tuples that a module's forward returns, and in nothing else.

        Args:
            batch: packed batch of T tokens.
            embeddings: (V, H) embedding of the target.
            num_positions: K, at most what the head was trained for.
        """

    def head_rows(self, batch: PackedBatch, embeddings: Tensor, num_positions: int) -> HeadRows:
        """`states`, and the teacher row of each: draft position k at row r meets that of row r + 1 + k."""
        states, own_loss = self.states(batch, embeddings, num_positions)
        counts = batch.layout.counts(num_positions)
        return HeadRows(states, batch.teachers(num_positions), counts, batch.chunks, own_loss)

    def confidence(self, rows: HeadRows) -> Tensor | None:
        """(M,) log-odds that each row's draft is accepted; None: the head predicts none."""
        return None

    @torch.no_grad()
    def draft(self, batch: PackedBatch, embeddings: Tensor, num_drafts: int) -> Tensor:
        """(K, R) draft ids that serving would propose from every root, greedily, as long as its drafts are accepted:
        a drafter that reads the tokens before a draft reads the text's."""
        rows, weight = self.head_rows(batch, embeddings, num_drafts), self.head_weight
        return torch.stack([(states @ weight.T).argmax(-1) for states in rows.states.split(rows.counts)])


class Drafter:
    """One kind of draft model, as a head section configures it."""

    MODULE: type[Any]  # the DraftModule, made from a shape; with random weights, of torch's generator
    vllm: "HeadFiles"  # reads and writes this drafter's files as vLLM does
    stops_at_rejection: ClassVar[bool] = False  # loss up to the first rejected draft, where the recipe does not say

    def __init__(self, head: HeadConfig):
        self.head = head
        self.num_positions = head.num_positions  # K

    @property
    def shares(self) -> Tensor:
        """(K, 1) which share of the rows with loss training uses at each draft position; those of a position are among
        those of the one before."""
        return torch.ones(self.num_positions, 1)

    @property
    def draws(self) -> bool:
        """Whether `trained_rows` are other ones at each draw."""
        return bool((self.shares < 1).any())

    @property
    def learns_features(self) -> bool:
        """Whether `own_loss` compares H features of each row, in float32, which the backward keeps."""
        return False

    @property
    def num_slots(self) -> int:
        """Rows of states that all drafts of one root are computed from, on average: what memory grows with."""
        return math.ceil(self.shares.sum())

    @property
    def lookahead(self) -> int:
        """Tokens after a row that its loss reads: a window ends so many tokens behind its last loss row."""
        return self.num_positions + 1

    def first_row(self, loss_mask: Tensor) -> int:
        """The first row of a document (T,) that can carry loss, or that such a row needs as a query; tokens of it are
        learned."""
        return max(int(loss_mask.nonzero()[0]) - 2, 0)

    @property
    def reach(self) -> int:
        """Tokens before a row that its drafts depend on; every layer adds a window's."""
        window = self.head.sliding_window
        return sys.maxsize if window is None else self.head.num_layers * (window - 1)

    def loss_rows(self, loss_mask: Tensor) -> Tensor:
        """(K, T) bool: where each draft position of one document (T,) contributes to the loss.

        Position k of root t predicts x[t+2+k]. It counts when every token from t+2 to t+2+k is learned and lies in the
        same document; then x[t+1] is learned too, or is the last prompt token, from which a draft can start. Six
        tokens, two of prompt (P) and four generated (G), which alone are learned, K = 2:

            root t                0    1    2    3    4    5
            token                 P0   P1   G2   G3   G4   G5
            position 0 predicts   G2   G3   G4   G5   -    -
            position 0 counts     1    1    1    1    0    0
            position 1 predicts   G3   G4   G5   -    -    -
            position 1 counts     1    1    1    0    0    0
        """
        # (K, T): x[t + 2 + k]
        ahead = pad(loss_mask.bool(), (0, self.num_positions + 1)).unfold(0, len(loss_mask), 1)[2:]
        return ahead.long().cumprod(0).bool()

    whole_blocks: bool = False  # whether a draft position of a root reads deeper ones too

    def trained_rows(self, loss_mask: Tensor, draw: int = 0) -> Tensor:
        """(K, T) bool: those of `loss_rows` that training uses in epoch `draw`; where rounds are replayed, all.

        Drawn by multiples of the golden ratio modulo 1, which are spread evenly over any stretch of the text, from
        another start at each draw.
        """
        row = torch.arange(len(loss_mask), dtype=torch.float64)
        drawn = (row * (5**0.5 - 1) / 2 + draw * (2**0.5 - 1)) % 1  # (T,) in [0, 1)
        return self.loss_rows(loss_mask) & (drawn < self.shares)

    def computed_rows(self, scored: Tensor) -> tuple[Tensor, ...]:
        """The rows that each draft position is computed for in training, as in `Layout.roots`: those with loss at this
        position or one that reads it. None, which is all, where selecting them would cost what it spares.

        Args:
            scored: (K, R) bool, rows of a packed batch that carry loss.
        """
        rows = [scored.any(0).nonzero()[:, 0]]
        for k in range(1, len(scored)):
            deeper = rows[0] if self.whole_blocks else scored[k:].any(0).nonzero()[:, 0]
            rows.append(deeper if len(deeper) else rows[-1][:1])  # keep one row: kernels reject empty inputs
        return tuple(rows) if sum(map(len, rows)) < _NEARLY_ALL * scored.numel() else ()

    def position_weights(self) -> Tensor:
        """(K,) float64 weight of the mean loss at each draft position; by itself all alike."""
        return torch.ones(self.num_positions, dtype=torch.float64)

    def from_target(
        self, shape: DraftShape, pieces: TargetPieces, vocabulary: DraftVocabulary, seed: int
    ) -> DraftModule:
        """A fresh module that starts from its target: lm_head rows and final norm are copied, not random. Blocks behind
        the first add nothing yet: a deep head begins as one of a single block."""
        torch.manual_seed(seed)
        model = self.MODULE(shape)
        with torch.no_grad():
            model.lm_head.weight.copy_(pieces.lm_head[vocabulary.target_ids])
            model.norm.weight.copy_(pieces.final_norm)
            for name, weight in model.named_parameters():
                if _FURTHER_BLOCK.match(name) and name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.zero_()
        return model


def load_trained(model: DraftModule, vocabulary: DraftVocabulary, start: dict[str, Tensor]) -> None:
    """Give a fresh module trained weights; rows of tokens that are new in the vocabulary stay as they are.

    Args:
        model: head to load into, with as many draft tokens as the start has.
        vocabulary: draft vocabulary of the model.
        start: tensors to load: every parameter by name, and the d2t and t2d that they were trained with.
    """
    known = start["t2d"][vocabulary.target_ids][:, None]
    places = start["t2d"].cumsum(0)[vocabulary.target_ids] - 1  # where known
    fresh = model.state_dict()
    moved = {name: torch.where(known, start[name][places], fresh[name]) for name in model.draft_rows}
    model.load_state_dict({name: moved.get(name, start[name]) for name in fresh})


def frozen_copy(shape: DraftShape, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> DraftModule:
    """A head with the given weights that is not trained.

    Args:
        shape: shape of the head.
        weights: every parameter by name; d2t and t2d may be among them.
        device: device that the head computes on.
        dtype: type that the head computes in.
    """
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced
        model = drafter_of(shape.head).MODULE(shape)
    parameters = {name: weights[name].to(device, dtype) for name in model.state_dict()}
    model.load_state_dict(parameters, assign=True)
    return model.eval().requires_grad_(False)


def parameter_shapes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every trainable weight; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in drafter_of(shape.head).MODULE(shape).named_parameters()}


def num_parameters(shape: DraftShape) -> int:
    """Trainable weights of a head."""
    return sum(math.prod(dimensions) for dimensions in parameter_shapes(shape).values())
