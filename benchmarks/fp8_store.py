"""What storing the aux hidden states in fp8 costs in acceptance length.

    python benchmarks/fp8_store.py [RECIPE] [section.key=value ...] [--seeds 3]

Trains the recipe's head on the same states twice per seed, once as stored in bf16 and once with the aux states
rounded to e4m3 as an fp8 store returns them (tests/generation/test_harvest.py shows that they are the same bits).
Everything else is equal: weights at the start, order of the batches, teacher. Acceptance length is replayed over the
validation split; the difference is paired by prompt, and its interval comes from a bootstrap over prompts.

A plain torch loop: AdamW at a constant rate, one process, float32. The recipe needs a finished bf16 store.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe
from drafthead.data.packing import pack, plan_epoch, whole
from drafthead.data.shard import StateSequence, quantise
from drafthead.data.spool import States
from drafthead.drafters.base import draft_shape
from drafthead.drafters.batch import dequantise
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import Acceptance
from drafthead.progress import progress
from drafthead.statistics import Interval, length_difference
from drafthead.target.pieces import frozen_target, load_pieces
from drafthead.training.inputs import draft_vocabulary, open_inputs, survey
from drafthead.training.trainer import LossModule, replayed

CPU = torch.device("cpu")


class Rounded:
    """States as an fp8 store returns them."""

    def __init__(self, states: States):
        self._states = states
        self.aux_layer_ids = states.aux_layer_ids

    def __getitem__(self, index: int) -> StateSequence:
        sequence = self._states[index]
        return replace(sequence, aux={layer_id: dequantise(*quantise(rows)) for layer_id, rows in sequence.aux.items()})

    stored = __getitem__


class Comparison:
    """The recipe's head on both kinds of states."""

    def __init__(self, recipe: Recipe):
        config = recipe.train
        self.recipe, self.config, self.inputs = recipe, config, open_inputs(recipe)
        vocab_size, self.drafter = self.inputs.spec.vocab_size, drafter_of(recipe.head)
        self.found = survey(self.inputs.train, vocab_size, config.tokens_per_batch, self.drafter)
        self.vocabulary, self.pieces = draft_vocabulary(recipe, self.found), load_pieces(recipe.target_path)
        self.target = frozen_target(self.pieces, self.inputs.spec, self.vocabulary.target_ids, CPU, torch.float32)
        self.train = {"bf16": self.inputs.train, "fp8": Rounded(self.inputs.train)}

    def run(self, kind: str, seed: int) -> list[Acceptance]:
        """Train on one kind of states; counters of every validation prompt on the states that serving gives, bf16."""
        head = self.recipe.head.sized(len(self.vocabulary.d2t))
        shape = draft_shape(head, self.inputs.spec, self.recipe.target.aux_layer_ids)
        objective = LossModule(self.drafter.from_target(shape, self.pieces, self.vocabulary, seed))
        optimizer = torch.optim.AdamW(objective.parameters(), lr=self.config.learning_rate, betas=(0.9, 0.95))
        steps = [batch for epoch in range(self.config.epochs) for batch in self._plan(seed, epoch)]
        for windows in progress(steps, f"{kind}, seed {seed}", "step"):
            batch = pack(self.train[kind], windows, self.drafter).to(CPU, torch.float32)
            scale = self.drafter.position_weights() / batch.scored.sum(1).clamp_min(1)
            objective(batch, self.target, scale.float()).loss.backward()
            torch.nn.utils.clip_grad_norm_(objective.parameters(), self.config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return list(self._accepted(objective))

    def _plan(self, seed: int, epoch: int) -> list:
        return plan_epoch(self.found.windows, self.config.tokens_per_batch, seed, epoch)

    def _accepted(self, objective: LossModule) -> Iterator[Acceptance]:
        states = self.inputs.validation
        for i in range(len(states)):
            mask = states.tokens(i)[1]
            if mask.any():
                window = whole(i, mask, self.drafter)
                batch = pack(states, [window], self.drafter, whole_text=True).to(CPU, torch.float32)
                target, K = self.target, self.drafter.num_positions
                drafts = self.drafter.draft(objective.draft, batch, target.embeddings, target.target_ids, K)
                yield replayed(drafts, self.target.target_ids, batch, self.recipe.eval.num_draft_tokens)


def difference(fp8: list[Acceptance], bf16: list[Acceptance]) -> Interval:
    """Acceptance length of fp8 minus that of bf16, paired by prompt."""
    counters = [np.array(x) for runs in (fp8, bf16) for x in ([a.drafts for a in runs], [a.accepted for a in runs])]
    return length_difference(*counters)


def pooled(formats: list[list[Acceptance]]) -> list[Acceptance]:
    """Per prompt, summed over seeds."""
    return [sum(rest, first) for first, *rest in zip(*formats, strict=True)]


def line(name: str, fp8: list[Acceptance], bf16: list[Acceptance]) -> str:
    """A row of the table."""
    found = difference(fp8, bf16)
    lengths = [sum(runs[1:], runs[0]).length for runs in (bf16, fp8)]
    change = f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    return f"| {name} | {lengths[0]:.4f} | {lengths[1]:.4f} | {change} | {found.value / lengths[0]:+.2%} |"


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, ("--seeds", {"type": int, "default": 3}))
    comparison = Comparison(recipe)
    formats: dict[str, list[list[Acceptance]]] = {"bf16": [], "fp8": []}
    print("| seed | bf16 | fp8 | difference [95 %] | relative |\n|---|---|---|---|---|")
    for seed in range(args.seeds):
        for kind in formats if seed % 2 == 0 else reversed(formats):
            formats[kind].append(comparison.run(kind, seed))
        print(line(str(seed), formats["fp8"][-1], formats["bf16"][-1]), flush=True)
    print(line("all", pooled(formats["fp8"]), pooled(formats["bf16"])))


if __name__ == "__main__":
    run_recipe(main)
