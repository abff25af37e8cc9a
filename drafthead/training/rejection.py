"""Loss up to the first draft that serving would reject.

Serving verifies the drafts of a round from left to right and drops what follows the first rejected one: a loss there
is spent on drafts that nobody reads. In every step the drafts of the weights as they are get compared with the stored
text; accepted ones and the first rejected one of a root carry loss, those behind it none (from every root: Spec-AUF,
arXiv 2607.01893). What it does beyond saving rows: a parallel drafter does not know the tokens between its root and a
position, so over all rows it learns what may stand there on average; over rows whose earlier drafts were right it
learns what follows those drafts. Of drafters that know the tokens before a draft no gain was resolved.

No engine says which drafts it accepts, because the text does: vLLM drafts argmax(q) and accepts it with the target's
probability, else draws from the rest of p, which is never the draft. So at any temperature a draft is accepted if and
only if it is the text's token (tests/pipeline/test_parity.py compares them, round by round). What that gives up: new
text.

A draft of one root, K = 4; the text is its draft up to G, S: has loss,

    draft        A     B     C     D
    text         A     B     G     H
    loss         S     S     S           accepted, accepted, rejected, not verified

One row weighs what it weighs without this: sums are divided by the number of rows that could carry loss. So ranks
exchange no counts, and any packing gives the same gradient. Costs: one more product with lm_head, without gradient, for
which the host waits on a GPU. Fewer rows carry loss.

Shapes: M rows of the drafter, K draft positions, R rows of a packed batch, D draft vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from drafthead.config import Recipe
from drafthead.config.train import Objective
from drafthead.drafters.batch import PackedBatch
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import match_text
from drafthead.losses.fused import HeadLoss, HeadRows, Teacher, first_drafts, head_loss


def stops_at_rejection(recipe: Recipe) -> bool:
    """What the recipe says, or what is best for its drafter."""
    if recipe.train.rejection is None:
        return drafter_of(recipe.head).stops_at_rejection
    return recipe.train.rejection


def rejection_loss(
    rows: HeadRows, weight: Tensor, teacher: Teacher, scale: Tensor, objective: Objective, batch: PackedBatch,
    target_ids: Tensor,
) -> HeadLoss:  # fmt: skip
    """As `head_loss`, over the drafts that serving would verify; predictions are of all scored rows.

    Args:
        rows, weight, teacher, scale, objective: arguments of `head_loss`.
        batch: batch that the rows belong to.
        target_ids: (D,) target id of every draft id.
    """
    predictions = first_drafts(rows, weight)
    read = verified(batch.spread(predictions), target_ids, batch)
    met = torch.where(batch.computed(read), rows.teacher, -1)
    scored = head_loss(replace(rows, teacher=met, chunks=None), weight, teacher, scale, objective)
    return scored._replace(predictions=predictions)


def verified(drafts: Tensor, target_ids: Tensor, batch: PackedBatch) -> Tensor:
    """(K, R) bool: accepted drafts, and the first rejected one of each root.

    Args:
        drafts: (K, R) draft ids, -1 where not scored.
        target_ids: (D,) target id of every draft id.
        batch: batch that the drafts are compared with.
    """
    matches = match_text(drafts, target_ids, batch.row_ids) & batch.scored
    accepted = matches.long().cumprod(0).bool()
    return torch.cat([torch.ones_like(accepted[:1]), accepted[:-1]]) & batch.scored
