"""Loss up to the first draft that serving would reject.

Serving verifies the drafts of a round from left to right and drops what follows the first rejected one: a loss there
is spent on drafts that nobody reads. In every step the drafts of the weights as they are get compared with the stored
text; accepted ones and the first rejected one of a root carry loss, those behind it none (from every root: Spec-AUF,
arXiv 2607.01893). What it does beyond saving rows: a parallel drafter does not know the tokens between its root and a
position, so over all rows it learns what may stand there on average; over rows whose earlier drafts were right it
learns what follows those drafts. Of drafters that know the tokens before a draft no gain was resolved.

With `train.rejection.roots: rounds` only roots at which serving starts to draft count, and with
`train.rejection.objective` the rejected draft has an objective of its own: reverse KL moves the draft's mass to where
the target has it (both are those of Draft-OPD, arXiv 2605.29343).

No engine records the rounds, because the text does: vLLM drafts argmax(q) and accepts it with the target's probability,
else draws from the rest of p, which is never the draft. So at any temperature a draft was accepted if and only if it is
the text's token, and rounds over stored text are those in which vLLM would have sampled it with the head of this step
(tests/pipeline/test_parity.py compares them, round by round). What that gives up: new text.

A draft of one root, K = 4; the text is its draft up to G, S: has loss,

    draft        A     B     C     D
    text         A     B     G     H
    loss         S     S     S           accepted, accepted, rejected, not verified; the next round starts at G

One row weighs what it weighs without this: sums are divided by the number of rows that could carry loss. So ranks
exchange no counts, and any packing gives the same gradient. In a window that starts within a response, the first round
starts at its first row. Costs: one more product with lm_head, without gradient, for which the host waits on a GPU;
and with two objectives a second buffer of the head's gradient. Fewer rows carry loss.

Shapes: M rows of the drafter, K draft positions, R rows of a packed batch, D draft vocabulary.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from drafthead.config import Recipe
from drafthead.config.train import Objective, RejectionConfig
from drafthead.drafters.batch import PackedBatch
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import generated_runs, match_text, round_roots
from drafthead.losses.fused import HeadLoss, HeadRows, Teacher, first_drafts, head_loss


def rejection_of(recipe: Recipe) -> RejectionConfig | None:
    """What the recipe says, or what is best for its drafter; None: loss on all draft positions."""
    given = recipe.train.rejection
    if given is None and drafter_of(recipe.head).stops_at_rejection:
        return RejectionConfig()
    return given or None


def rejection_loss(
    rows: HeadRows, weight: Tensor, teacher: Teacher, scale: Tensor, objective: Objective, rejection: RejectionConfig,
    batch: PackedBatch, target_ids: Tensor,
) -> HeadLoss:  # fmt: skip
    """As `head_loss`, over the drafts that serving would verify; predictions are of all scored rows.

    Args:
        rows, weight, teacher, scale: as of `head_loss`.
        objective: of accepted drafts.
        rejection: which roots, and the objective of the rejected draft.
        batch: that the rows are of.
        target_ids: (D,) target id of every draft id.
    """
    predictions = first_drafts(rows, weight)
    accepted, rejected = verified(batch.spread(predictions), target_ids, batch, rejection.roots)
    other = rejection.objective or objective
    parts = [(accepted | rejected, objective)] if other == objective else [(accepted, objective), (rejected, other)]
    scored = []
    for part, own in parts:
        met = torch.where(batch.computed(part), rows.teacher, -1)
        scored.append(head_loss(replace(rows, teacher=met, chunks=None), weight, teacher, scale, own))
    sums = torch.stack([part.position_sums for part in scored]).sum(0)
    return HeadLoss(torch.stack([part.loss for part in scored]).sum(), sums, predictions)


def verified(drafts: Tensor, target_ids: Tensor, batch: PackedBatch, roots: str) -> tuple[Tensor, Tensor]:
    """Accepted and rejected drafts, each (K, R) bool; a root has at most one rejected one.

    Args:
        drafts: (K, R) draft ids, -1 where not scored.
        target_ids: (D,) target id of every draft id.
        batch: the text.
        roots: all of them, or those at which "rounds" start.
    """
    matches = match_text(drafts, target_ids, batch.row_ids) & batch.scored
    accepted = matches.long().cumprod(0).bool()
    reached = torch.cat([torch.ones_like(accepted[:1]), accepted[:-1]]) & batch.scored
    if roots == "rounds":
        reached = reached & started(accepted.sum(0).tolist(), batch).to(reached.device)
    return reached & matches, reached & ~matches


def started(accepted_from: list[int], batch: PackedBatch) -> Tensor:
    """(R,) bool: roots at which a round starts, in every run of learned tokens, as if the target had generated
    a learned prompt; `accepted_from` (R,) counts drafts."""
    starts, generated = torch.zeros(len(accepted_from), dtype=torch.bool), batch.loss_mask.cpu()
    for a, b in pairwise(batch.layout.cu_rows.tolist()):
        for run in generated_runs(generated[a:b]):
            # Of a run that began before the window, the first row is the first root.
            roots = round_roots(accepted_from[a:b], slice(max(run.start, 1), run.stop))
            starts[[a + root for root in roots]] = True
    return starts
