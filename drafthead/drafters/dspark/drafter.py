"""DSpark (arXiv 2607.05147): DFlash's backbone, and drafts that know the token before them.

The block of root t holds the known token x[t+1] and K - 1 masks; every slot predicts the token behind it, so the known
token's slot makes the first draft. To the logits of draft k comes a bias of low rank, `markov_w2 @ markov_w1[x]`, of
the token x before it: in training the text's, in serving the draft just made. State and token enter linearly, so both
are one product, of cat(state, markov_w1[x]) with cat(lm_head, markov_w2), and the loss knows no difference.

The confidence head predicts from the same rows whether a draft is accepted at temperature 0: whether it is the
target's first choice. vLLM's adaptive verification reads it. Its gradient stops at the rows, so it changes no draft;
the paper's label is 1 minus the total variation, which holds for sampled drafts.

Names and arithmetic are those of vLLM's `Qwen3DSparkModel` with `sample_from_anchor`. Shapes: R rows, P roots whose
block is formed, K draft positions, H hidden, D draft vocabulary, V target vocabulary, r rank.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafthead.drafters.base import DraftShape
from drafthead.drafters.batch import PackedBatch
from drafthead.drafters.dflash.drafter import DFlash, DFlashFiles, DFlashModel
from drafthead.drafters.dspark.config import DSparkHead
from drafthead.drafters.layers import Projection
from drafthead.drafters.vllm import Config
from drafthead.losses.fused import HeadRows

# Keys of config.json.
_RANK, _ANCHOR = "markov_rank", "sample_from_anchor"
_CONFIDENCE, _WITH_MARKOV = "enable_confidence_head", "confidence_head_with_markov"


class DSparkModel(DFlashModel):
    """The trainable head."""

    head: DSparkHead
    markov_head: Any  # modules by vLLM's names: the bias of a token on the next one
    confidence_head: Any  # log-odds that a draft is accepted
    num_unscored_slots = 0
    draft_rows = (*DFlashModel.draft_rows, "markov_head.markov_w2.weight")

    def __init__(self, shape: DraftShape):
        super().__init__(shape)
        head = self.head
        self.markov_head = nn.ModuleDict({
            "markov_w1": nn.Embedding(shape.vocab_size, head.markov_rank),
            "markov_w2": Projection(head.markov_rank, head.draft_vocab_size),
        })  # fmt: skip
        nn.init.zeros_(self.markov_head.markov_w2.weight)  # starts as DFlash
        self.confidence_head = None
        if head.confidence:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(shape.hidden_size + head.markov_rank, 1)})
            nn.init.zeros_(self.confidence_head.proj.weight)

    @property
    def head_weight(self) -> Tensor:
        """(D, H + r)."""
        return torch.cat([self.lm_head.weight, self.markov_head.markov_w2.weight], dim=1)

    def confidence(self, rows: HeadRows) -> Tensor | None:
        """(M,) log-odds that each row's draft is the target's first choice."""
        return None if self.confidence_head is None else self.confidence_head.proj(rows.states.detach())[:, 0]

    def states(self, batch: PackedBatch, embeddings: Tensor, num_positions: int) -> tuple[Tensor, None]:
        """(K x P, H + r); the token before draft k of root t is x[t+1+k]."""
        states = self.slots(batch, embeddings, num_positions)
        before = torch.stack([batch.ahead(1 + k) for k in range(num_positions)])
        return torch.cat([states, self.markov_head.markov_w1(before)], dim=-1).flatten(0, 1), None


class DSparkFiles(DFlashFiles):
    """Files of DSpark heads as vLLM 0.32 reads them: DFlash's with the Markov bias. vLLM serves them on GPUs only."""

    METHOD = TYPE = "dspark"
    OWN: ClassVar[dict[str, str]] = {**DFlashFiles.OWN, _RANK: _RANK, "confidence": _CONFIDENCE}
    ALGORITHM = "DSpark"
    ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
    GPU_ONLY = True  # model runner V2 serves it, which needs one

    def plain_config(self, shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
        assert isinstance(shape.head, DSparkHead)
        return {
            **super().plain_config(shape, aux_layer_ids, dtype),
            "architectures": ["Qwen3DSparkModel"],
            _RANK: shape.head.markov_rank,
            "markov_head_type": "vanilla",
            "block_size": shape.head.num_draft_positions,
            _ANCHOR: True,
            _CONFIDENCE: shape.head.confidence,
            _WITH_MARKOV: True,
        }

    def served_values(self, config: Config) -> Config:
        confidence = config.get(_CONFIDENCE, False)
        if not config.get(_ANCHOR, True):
            raise ValueError(f"the head sets {_ANCHOR}=False, whose known token drafts nothing; supported: True")
        if confidence and not config.get(_WITH_MARKOV, False):
            raise ValueError(f"the head's confidence head ignores the Markov state; supported is {_WITH_MARKOV}=True")
        return {**super().served_values(config), _RANK: config[_RANK], _CONFIDENCE: confidence}


class DSpark(DFlash):
    """DSpark behind the interface of `drafters.base`."""

    head: DSparkHead
    MODULE = DSparkModel
    vllm = DSparkFiles()
    stops_at_rejection = False  # a draft knows the ones before it: no gain was resolved
