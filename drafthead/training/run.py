"""A run: everything the loop touches, built once and restored from the newest whole checkpoint.

The data of optimiser step s is a pure function of the recipe: the epochs' packed batches form one stream,
and step s takes the next `ranks x accumulation` of them.
"""

from dataclasses import dataclass
from typing import Any

import torch

from drafthead.config import Recipe, TrainConfig
from drafthead.core.vocabulary import DraftVocabulary, coverage
from drafthead.data.packing import PackedBatch, pack, plan_stream
from drafthead.data.store import States
from drafthead.data.windows import Window
from drafthead.models.draft import draft_shape
from drafthead.models.target import load_pieces
from drafthead.training import checkpoint
from drafthead.training.accelerator import build_accelerator
from drafthead.training.feed import Feed, build_feed
from drafthead.training.objective import FrozenTarget, TTTObjective
from drafthead.training.setup import (
    Inputs,
    build_model,
    draft_vocabulary,
    frozen_target,
    survey,
)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Run:
    """Everything the loop touches.

    Attributes:
        recipe, inputs: what is trained on what.
        accelerator, engine, optimizer: accelerate's, DeepSpeed's and the wrapped AdamW.
        target, vocabulary: frozen tensors, d2t and t2d.
        stream: packed micro batches of all epochs.
        feed: what the loop asks when states come and go.
        state: where training stands.
    """

    recipe: Recipe
    inputs: Inputs
    accelerator: Any
    engine: Any
    optimizer: Any
    target: FrozenTarget
    vocabulary: DraftVocabulary
    stream: list[list[Window]]
    feed: Feed
    state: checkpoint.TrainState

    @property
    def config(self) -> TrainConfig:
        return self.recipe.train

    @property
    def micro_batches_per_step(self) -> int:
        return self.accelerator.num_processes * self.config.gradient_accumulation_steps

    @property
    def total_steps(self) -> int:
        return len(self.stream) // self.micro_batches_per_step

    def load(self, store: States, windows: list[Window]) -> PackedBatch:
        """One micro batch on this rank's device, states in the compute type."""
        return pack(store, windows).to(self.accelerator.device, _DTYPES[self.config.precision])


def prepare(recipe: Recipe, inputs: Inputs) -> Run:
    """Build model, optimiser and engine, and restore the newest whole checkpoint."""
    config = recipe.train
    found = survey(inputs.train, inputs.spec.vocab_size, config.tokens_per_batch, config.num_ttt_steps)
    vocabulary = draft_vocabulary(recipe, found)
    pieces = load_pieces(recipe.target_path, recipe.target.revision)
    draft = build_model(
        draft_shape(recipe, inputs.spec), pieces, vocabulary, config.seed, blind=config.zero_hidden_states
    )
    objective = TTTObjective(draft, config.num_ttt_steps, config.objective, config.zero_hidden_states)
    accelerator = build_accelerator(config, objective, str(recipe.run_dir))
    if config.tracker != "none":
        accelerator.init_trackers(recipe.name, config=recipe.model_dump(mode="json"))
    optimizer = torch.optim.AdamW(
        objective.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
    engine, optimizer = accelerator.prepare(objective, optimizer)
    stream = plan_stream(inputs.train, found.windows, config.tokens_per_batch, config.seed, config.epochs)
    feed = build_feed(inputs.train, stream, accelerator.num_processes * config.gradient_accumulation_steps, accelerator)
    run = Run(
        recipe, inputs, accelerator, engine, optimizer,
        target=frozen_target(pieces, inputs.spec, vocabulary, accelerator.device, _DTYPES[config.precision]),
        vocabulary=vocabulary, stream=stream, feed=feed, state=_restore(recipe, accelerator, engine),
    )  # fmt: skip
    if run.total_steps == 0:
        raise ValueError(
            f"{len(stream)} packed batches do not fill one optimiser step of {run.micro_batches_per_step} "
            "(ranks x accumulation): harvest more data, raise train.epochs or lower train.tokens_per_batch"
        )
    if accelerator.is_main_process:
        share = coverage(found.generated, vocabulary)
        silent = f", {found.silent} without a position to learn from" if found.silent else ""
        print(
            f"{run.total_steps} steps of {run.micro_batches_per_step} packed batches; {len(inputs.train)} sequences "
            f"in {len(found.windows)} windows{silent}; draft vocabulary {len(vocabulary.d2t)} of "
            f"{inputs.spec.vocab_size} covers {share:.2%} of generated tokens"
        )
    return run


def _restore(recipe: Recipe, accelerator: Any, engine: Any) -> checkpoint.TrainState:
    found = checkpoint.newest(recipe.run_dir)
    if found is None:
        return checkpoint.TrainState(0, accelerator.num_processes, recipe.train.zero_stage, 0.0, 0, 0.0)
    path, state = found
    checkpoint.load(engine, path, state, accelerator.num_processes, recipe.train.zero_stage)
    if accelerator.is_main_process:
        print(f"resuming from step {state.step}")
    return state
