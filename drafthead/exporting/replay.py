"""Acceptance predicted from weights alone: drafting rounds replayed over the target's own answers.

The same definition as training's validation, in the shortest form: step k of every row at once, the most likely
draft token of each, and `drafters.replay` to walk the rounds. Prompt by prompt, so that an engine's counters can be
compared answer by answer. float32 throughout; what this gives up is speed, which a few dozen answers do not need.

Shapes: T tokens of one document, R rows, K draft tokens, H hidden, D draft vocabulary, V target vocabulary.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from drafthead.data.packing import pack, whole
from drafthead.data.store import StateStore
from drafthead.drafters.eagle3.model import DraftModel
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import Acceptance, last_answer, match_text, replay


@dataclass(frozen=True)
class Answer:
    """One document of the validation store.

    Attributes:
        index: in the store.
        prompt_ids: everything before the target's last turn.
        answer_ids: that turn, the stop token included.
    """

    index: int
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def tokens(self) -> int:
        """Of prompt and answer together."""
        return len(self.prompt_ids) + len(self.answer_ids)


def fitting_answers(store: StateStore, longest: int) -> list[Answer]:
    """The answers of a store that can be compared with an engine's.

    Args:
        store: T = 0 answers of the target.
        longest: tokens of prompt and answer together.
    """
    answers = [_last_turn(index, *store.tokens(index)) for index in range(len(store))]
    return [a for a in answers if a.prompt_ids and a.answer_ids and a.tokens <= longest]


def first_answers(answers: list[Answer], limit: int, budget: int) -> list[Answer]:
    """At most `limit` of them, with `budget` tokens of all together; at least one."""
    tokens = list(accumulate(answer.tokens for answer in answers))
    return answers[: max(1, min(limit, bisect_right(tokens, budget)))]


@torch.no_grad()
def predicted_rounds(
    model: DraftModel, embeddings: Tensor, target_ids: Tensor, store: StateStore, index: int, num_drafts: int
) -> Acceptance:
    """Replay the rounds of one document.

    Args:
        model: in float32.
        embeddings: (V, H) of the target.
        target_ids: (D,) target id of every draft id.
        store: where the document's states are.
        index: of the document.
        num_drafts: K.
    """
    mask = store.tokens(index)[1]
    drafter = drafter_of(model.shape.head)
    batch = pack(store, [whole(index, mask, drafter)], drafter).to(torch.device("cpu"), torch.float32)
    drafts = drafter.draft(model, batch, embeddings.float(), num_drafts)  # (K, R)
    return replay(match_text(drafts, target_ids, batch.row_ids), batch.loss_mask)


def _last_turn(index: int, ids: Tensor, mask: Tensor) -> Answer:
    turn = last_answer(mask)
    return Answer(index, ids[: turn.start].tolist(), ids[turn].tolist())
