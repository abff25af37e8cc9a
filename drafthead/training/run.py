"""A run: everything the loop touches, built once and restored from the newest whole checkpoint.

The data of optimiser step s is a pure function of the recipe: the epochs' packed batches form one stream,
and step s takes the next `train.batches_per_step` of them, whatever the number of ranks.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from drafthead.config import Recipe, TrainConfig
from drafthead.data.packing import PackedBatch, pack, plan_stream
from drafthead.data.responses import read_categories
from drafthead.data.windows import Window
from drafthead.drafters.eagle3.model import DraftModel, DraftShape, draft_shape
from drafthead.drafters.vocabulary import DraftVocabulary, coverage
from drafthead.provenance import digest
from drafthead.target.pieces import TargetPieces, load_pieces
from drafthead.training import checkpoint
from drafthead.training.accelerator import build_accelerator
from drafthead.training.agreement import check_ranks, check_vocabulary
from drafthead.training.feed import Feed, build_feed
from drafthead.training.metrics import flatten, start_tracker
from drafthead.training.objective import FrozenTarget, TTTObjective
from drafthead.training.optimizer import build_optimizer
from drafthead.training.prefetch import Prefetch
from drafthead.training.setup import (
    Inputs,
    Survey,
    build_model,
    draft_vocabulary,
    frozen_target,
    survey,
)
from drafthead.training.start import keep_start, started_model
from drafthead.training.validate import judged

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Run:
    """Everything the loop touches.

    Attributes:
        recipe, inputs: what is trained on what.
        accelerator, engine, optimizer: accelerate's, DeepSpeed's and the wrapped torch optimiser.
        shape: of the head.
        target, vocabulary: frozen tensors, d2t and t2d.
        stream: packed micro batches of all epochs.
        judged: what acceptance is predicted on.
        feed: what the loop asks when states come and go.
        prefetch: reads the stream one micro batch ahead.
        state: where training stands.
    """

    recipe: Recipe
    inputs: Inputs
    accelerator: Any
    engine: Any
    optimizer: Any
    shape: DraftShape
    target: FrozenTarget
    vocabulary: DraftVocabulary
    stream: list[list[Window]]
    judged: list[Window]
    feed: Feed
    prefetch: Prefetch
    state: checkpoint.TrainState

    @property
    def config(self) -> TrainConfig:
        return self.recipe.train

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in; weights and their update are float32 beside it."""
        return _DTYPES[self.config.precision]

    @property
    def total_steps(self) -> int:
        return len(self.stream) // self.config.batches_per_step

    def load(self, batch: PackedBatch) -> PackedBatch:
        """A micro batch on this rank's device, states in the compute type."""
        return batch.to(self.accelerator.device, self.dtype)

    def track(self, values: dict[str, Any], group: str, step: int) -> None:
        """Send numbers to the recipe's tracker, if it has one."""
        if self.config.tracker != "none":
            self.accelerator.log(flatten(values, group), step=step)


def prepare(recipe: Recipe, inputs: Inputs) -> Run:
    """Build model, optimiser and engine, and restore the newest whole checkpoint."""
    config = recipe.train
    categories = read_categories(recipe.responses_dir("train"))
    found = survey(inputs.train, inputs.spec.vocab_size, config.tokens_per_batch, config.num_ttt_steps, categories)
    pieces = load_pieces(recipe.target_path, recipe.target.revision)
    shape, draft, vocabulary = _new_head(recipe, inputs, found, pieces)
    objective = TTTObjective(
        draft, config.num_ttt_steps, config.objective, config.zero_hidden_states, config.gradient_checkpointing
    )
    accelerator = build_accelerator(config, objective, str(recipe.run_dir))
    check_ranks({**inputs.identity, "draft vocabulary": digest(vocabulary.d2t.tolist())})
    if config.tracker != "none":
        start_tracker(accelerator, recipe)
    engine, optimizer = accelerator.prepare(objective, build_optimizer(config, draft))
    if config.compile:
        engine.compile(compile_kwargs={"dynamic": True})  # every packed batch has lengths of its own
    stream = plan_stream(inputs.train, found.windows, config.tokens_per_batch, config.seed, config.epochs)
    feed = build_feed(inputs.train, stream, config.batches_per_step, accelerator)
    run = Run(
        recipe, inputs, accelerator, engine, optimizer, shape,
        target=frozen_target(pieces, inputs.spec, vocabulary, accelerator.device, _DTYPES[config.precision]),
        vocabulary=vocabulary, stream=stream, judged=judged(inputs.validation, config.num_ttt_steps), feed=feed,
        prefetch=Prefetch(stream, partial(pack, inputs.train), pin=accelerator.device.type == "cuda"),
        state=_restore(recipe, accelerator, engine, vocabulary),
    )  # fmt: skip
    if run.total_steps == 0:
        raise ValueError(
            f"{len(stream)} packed batches do not fill one optimiser step of train.batches_per_step "
            f"{config.batches_per_step}: harvest more data, raise train.epochs or lower train.tokens_per_batch"
        )
    if accelerator.is_main_process:
        share = coverage(found.generated, vocabulary)
        silent = f", {found.silent} without a position to learn from" if found.silent else ""
        print(
            f"{run.total_steps} steps of {config.batches_per_step} packed batches; {len(inputs.train)} sequences "
            f"in {len(found.windows)} windows{silent}; draft vocabulary {len(vocabulary.d2t)} of "
            f"{inputs.spec.vocab_size} covers {share:.2%} of generated tokens"
        )
        if left_over := len(stream) % config.batches_per_step:
            print(f"the last {left_over} of {len(stream)} packed batches do not fill a step and are not trained on")
        for category, counts in sorted(found.by_category.items()):
            print(f"  {category:<20} {coverage(counts, vocabulary):.2%} of {int(counts.sum()):,}")
        if looping := len(inputs.validation) - len(run.judged):
            print(
                f"{looping} of {len(inputs.validation)} validation answers loop or are empty: left out of acceptance, "
                "as they are in evaluation"
            )
    return run


def _new_head(
    recipe: Recipe, inputs: Inputs, found: Survey, pieces: TargetPieces
) -> tuple[DraftShape, DraftModel, DraftVocabulary]:
    """The head at step 0: made from its target, or with the weights and the vocabulary of `train.init_from`."""
    config = recipe.train
    if inputs.start is None:
        vocabulary = draft_vocabulary(recipe, found)
        shape = _shape(recipe, inputs, vocabulary)
        return shape, build_model(shape, pieces, vocabulary, config.seed, config.zero_hidden_states), vocabulary
    start = keep_start(recipe, inputs.start)
    weights = start.weights()
    vocabulary = DraftVocabulary(weights["d2t"], weights["t2d"])
    shape = start.shape(_shape(recipe, inputs, vocabulary))
    return shape, started_model(shape, weights, config.zero_hidden_states), vocabulary


def _shape(recipe: Recipe, inputs: Inputs, vocabulary: DraftVocabulary) -> DraftShape:
    head = recipe.head.sized(len(vocabulary.d2t))
    return draft_shape(recipe.model_copy(update={"head": head}), inputs.spec)


def _restore(recipe: Recipe, accelerator: Any, engine: Any, vocabulary: DraftVocabulary) -> checkpoint.TrainState:
    from accelerate.utils import broadcast_object_list

    ranks, config = accelerator.num_processes, recipe.train
    # Verifying reads every byte: once, and all ranks go by the same answer.
    found = None
    if accelerator.is_main_process:
        checkpoint.remove_leftovers(recipe.run_dir)
        found = checkpoint.newest(recipe.run_dir)
        if found is not None:  # killed before it came to that
            checkpoint.retain(recipe.run_dir, config.keep_checkpoints, found[1])
    (found,) = broadcast_object_list([found])
    if found is None:
        return checkpoint.TrainState(0, ranks, config.zero_stage, 0.0, 0, 0.0)
    path, state = found
    check_vocabulary(path, vocabulary)
    averaged = config.ema_decay is not None
    if state.world_size != ranks and (config.optimizer == "muon" or (averaged and config.zero_stage == 3)):
        raise ValueError(
            f"{path} was written by {state.world_size} ranks and this run has {ranks}: DeepSpeed's universal "
            "checkpoint leaves out the moments of train.optimizer muon, and those of train.ema_decay at "
            f"train.zero_stage 3. Resume with {state.world_size} ranks"
        )
    checkpoint.load(accelerator, engine, path, state, averaged)
    if accelerator.is_main_process:
        reshaped = "" if state.world_size == ranks else f" (written by {state.world_size} ranks, now {ranks})"
        print(f"resuming from step {state.step}{reshaped}")
    return state
