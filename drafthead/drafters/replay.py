"""Acceptance predicted by replay: what an engine's counters would show, without an engine.

The engine drafts from a root, keeps the drafts that equal the target's own text, and starts the next
round right after the first that does not. Replaying those rounds over the target's temperature-0 text
visits only the places where a round really starts, which are the harder ones: averaging over all
positions instead overstates the acceptance length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Acceptance:
    """Pooled counters over drafting rounds, as an engine counts them.

    Attributes:
        drafts: number of rounds.
        accepted_per_position: K counts; entry i is how often at least i + 1 drafts were accepted.
    """

    drafts: int
    accepted_per_position: tuple[int, ...]

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def length(self) -> float:
        """Acceptance length: tokens per round, the bonus token included; nan without a round."""
        return 1 + self.accepted / self.drafts if self.drafts else float("nan")

    @property
    def rates(self) -> tuple[float, ...]:
        """Joint prefix acceptance per position."""
        return tuple(n / self.drafts if self.drafts else float("nan") for n in self.accepted_per_position)

    def __add__(self, other: "Acceptance") -> "Acceptance":
        pairs = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return Acceptance(self.drafts + other.drafts, tuple(a + b for a, b in pairs))


def replay(matches: Tensor, loss_mask: Tensor, max_tokens: int | None = None) -> Acceptance:
    """Replay the drafting rounds over one document.

    Args:
        matches: (K, T) bool for the document, from its first to its last token.
        loss_mask: (T,) nonzero where the target generated the token. Only the last generated run is
            replayed: what follows an earlier one was not said by the target.
        max_tokens: rounds are replayed over so many generated tokens at most, as many as evaluation serves, since
            later ones are easier to draft; None: all.

    Returns:
        Counters over the rounds of the document; empty when nothing was generated.
    """
    accepted = matches.long().cumprod(0)  # (K, T): whether the draft and all before it are
    roots = round_roots(accepted.sum(0).tolist(), last_response(loss_mask, max_tokens))
    return Acceptance(len(roots), tuple(accepted[:, roots].sum(1).tolist()))


def round_roots(accepted_from: list[int], run: slice) -> list[int]:
    """Roots of the rounds in which an engine generates a run of tokens.

    Args:
        accepted_from: (T,) drafts accepted from each root.
        run: the tokens; the first root is the token before them.
    """
    roots, root = [], run.start - 1
    # A round starts after a token unless that token ends the response.
    while root >= 0 and root + 1 < run.stop - 1:
        roots.append(root)
        root += accepted_from[root] + 1
    return roots


def generated_runs(loss_mask: Tensor) -> list[slice]:
    """Where the runs of generated tokens lie in a document; `loss_mask` (T,) is nonzero where one was generated."""
    edges = pad(loss_mask.bool().long(), (1, 1)).diff().nonzero()[:, 0].tolist()
    return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def last_response(loss_mask: Tensor, max_tokens: int | None = None) -> slice:
    """Where the last run of generated tokens lies in a document, its first `max_tokens`; empty without any.

    Args:
        loss_mask: (T,) nonzero where the target generated the token.
    """
    response = [slice(0, 0), *generated_runs(loss_mask)][-1]
    return response if max_tokens is None else slice(response.start, min(response.stop, response.start + max_tokens))


def empty_acceptance(num_steps: int) -> Acceptance:
    """No rounds yet."""
    return Acceptance(0, (0,) * num_steps)


def match_text(predictions: Tensor, target_ids: Tensor, input_ids: Tensor) -> Tensor:
    """Which drafts equal the text.

    Args:
        predictions: (K, T) draft ids, -1 where none was made.
        target_ids: (D,) target id per draft id.
        input_ids: (T,) the text.

    Returns:
        (K, T) bool: step k's draft at t equals x[t + 2 + k].
    """
    num_steps, num_tokens = predictions.shape
    proposed = torch.where(predictions >= 0, target_ids[predictions.clamp_min(0)], -1)
    ahead = pad(input_ids, (0, num_steps + 1), value=-2).unfold(0, num_tokens, 1)[2:]  # (K, T): x[t + 2 + k]
    return proposed == ahead
