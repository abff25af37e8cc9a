"""A scheduler for engines that capture hidden states while they generate: it schedules no drafts.

vLLM captures through its speculative path. The method `extract_hidden_states` proposes, as a draft for the next step,
the token that was just sampled once more. Hardly any is accepted, each costs a row of the decode step, and at
temperature > 0 the rejection sampler draws from another random stream than plain sampling does. Nothing obliges the
scheduler to use a draft: without, every step computes one token per request, the plain sampler samples it, and states
are captured all the same. Given up: a scheduler class of one's own is no stable interface of vLLM's; a test compares
the tokens with those of a plain engine.
"""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds


class WithoutDrafts(Scheduler):
    """vLLM's scheduler (the one without async scheduling), deaf to proposals."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """What was proposed is not scheduled."""
