"""Training a draft model: one object that builds everything from a recipe, takes the steps, and keeps what they give.

The data of optimiser step s is a pure function of the recipe: the epochs' packed batches form one stream, and step s
takes the next `train.batches_per_step` of them, whatever the number of ranks. The loss of each draft position is
divided by the number of its rows in the whole optimiser step, counted from the masks beforehand. So the same data gives
the same gradient at any micro batch size, accumulation or rank count, and ranks exchange no counts.

Shapes: T tokens, R rows, K draft positions, H hidden, D draft vocabulary, V target vocabulary.
"""

import logging
import math
import os
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from drafthead import artifacts, locks
from drafthead.config import Recipe
from drafthead.data.packing import Window, pack, plan_epoch, plan_stream, whole
from drafthead.data.prompts import noted_prompts, write_trained_on
from drafthead.data.responses import loops, read_categories
from drafthead.data.spool import PROGRESS_LOCK, SpooledStates, States
from drafthead.drafters.base import Drafter, DraftModule, draft_shape, frozen_copy, load_trained
from drafthead.drafters.batch import PackedBatch
from drafthead.drafters.recompute import trim_heap
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import Acceptance, empty_acceptance, last_response, match_text, replay
from drafthead.drafters.trained import RUN
from drafthead.drafters.vocabulary import coverage
from drafthead.losses.fused import HeadLoss, Teacher, head_loss
from drafthead.losses.objectives import reads_mass
from drafthead.progress import progress_bar
from drafthead.statistics import few
from drafthead.target.pieces import FrozenTarget, frozen_target, load_pieces
from drafthead.training import checkpoint
from drafthead.training.accelerator import accumulation_steps, build_accelerator, check_ranks
from drafthead.training.feed import Feed, Prefetch, SpoolFeed
from drafthead.training.inputs import Inputs, Survey, draft_vocabulary, open_inputs, survey
from drafthead.training.metrics import MetricsLog, StepMetrics, Validation, peak_memory_gib, start_tracker
from drafthead.training.optimizer import build_optimizer, gradient_norm, schedule
from drafthead.training.rejection import rejection_loss, stops_at_rejection

logger = logging.getLogger(__name__)


def train(recipe: Recipe) -> Path:
    """Train the recipe's head, or continue where an earlier run stopped.

    Returns:
        The run's directory: checkpoints, metrics.jsonl, manifest.json.

    Raises:
        ArtifactError: inputs are missing, unfinished or do not fit the recipe.
        InUseError: another process is training this run.
        ValueError: the recipe or the environment cannot be trained with.
        FloatingPointError: the loss or a gradient is not finite.
    """
    first = os.environ.get("RANK", "0") == "0"  # locks for all ranks: the launcher ends the others with it
    if not first:  # nor do all of them tell what happens
        logging.getLogger("drafthead").setLevel(logging.WARNING)
    accumulation_steps(recipe.train)  # a number of ranks that cannot share a step is refused before anything is read
    inputs = open_inputs(recipe)
    if artifacts.begin(recipe.run_dir, RUN, inputs.identity, thinned=True, alone=first):
        logger.info("%s is complete; nothing to do", recipe.run_dir)
        return recipe.run_dir
    try:
        if first and recipe.states.spool_shards and not locks.holds(recipe.states_dir("train"), PROGRESS_LOCK):
            locks.acquire(recipe.states_dir("train"), PROGRESS_LOCK)
        trainer = Trainer(recipe, inputs)
    except BaseException:
        artifacts.unclaim(recipe.run_dir)  # also of a later rank, which may have claimed it again
        raise
    if first:
        before = None if inputs.start is None else noted_prompts(inputs.start.run_dir)
        if inputs.start is not None:
            known = "not known" if before is None else "noted"
            logger.info("starting from %s; the prompts that it learned from are %s", recipe.train.init_from, known)
        write_trained_on(recipe.run_dir, inputs.prompt_ids | (before or set()))
    log = MetricsLog(trainer.accelerator, recipe.run_dir, trainer.state.step, trainer.total_steps)
    trainer.fit(log)
    if trainer.main:
        state = trainer.state
        counts = {**asdict(state), "total_steps": trainer.total_steps, "train_seconds": log.seconds()}
        locks.release(recipe.states_dir("train"), PROGRESS_LOCK)  # first: a finished run is not looked at again
        artifacts.finish(recipe.run_dir, counts)
        best, last = state.best_acceptance_length, state.acceptance_length
        logger.info(
            f"best checkpoint: step {state.best_step}, predicted acceptance length {best:.3f} at "
            f"K={recipe.eval.num_draft_tokens}{few(state.prompts)}; at the last step, {state.step}, it is {last:.3f} "
            f"({last / best - 1:+.1%})"
        )
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return recipe.run_dir


class LossModule(nn.Module):
    """What DeepSpeed wraps: the draft model's rows, scored against the target in one fused pass."""

    def __init__(
        self,
        draft: DraftModule,
        objective: Any = "forward_kl",
        rejection: bool = False,
        temperature: float = 1.0,
    ):
        super().__init__()
        self.draft, self.objective, self.rejection, self.temperature = draft, objective, rejection, temperature
        self.reads_mass = reads_mass(objective)

    def forward(self, batch: PackedBatch, target: FrozenTarget, scale: Tensor) -> HeadLoss:
        """Loss over the scored rows of a batch.

        Args:
            batch: packed batch of T tokens.
            target: frozen tensors of the target.
            scale: (K,) weight of one row's loss at each draft position, normalisation included.
        """
        rows = self.draft.head_rows(batch, target.embeddings, len(scale))
        trim_heap(rows.states)  # what the steps freed, before the loss needs buffers
        normed, lse, served = target.normed(batch.last_hidden), batch.lse, rows
        if (T := self.temperature) != 1:
            lse = target.lse_at(T, normed, lse) if self.reads_mass else lse
            # Logits divided by T are those of states divided by T, the target's and the draft's.
            normed, served = normed / T, replace(rows, states=rows.states / T)
        teacher = Teacher(normed, target.head_rows, lse)
        if not self.rejection:
            scored = head_loss(served, self.draft.head_weight, teacher, scale, self.objective)
        else:
            weight, ids = self.draft.head_weight, target.target_ids
            scored = rejection_loss(served, weight, teacher, scale, self.objective, batch, ids)
        trim_heap(rows.states)
        # No objective shows every lse that is not finite, and some lose it in a minimum; these sums end the run.
        scored = scored._replace(position_sums=scored.position_sums + 0 * batch.lse.sum())
        own_loss, confidence = rows.own_loss, self.draft.confidence(rows)
        if confidence is not None:
            hits = first_choices(scored, batch, target).to(confidence.dtype)
            missed = binary_cross_entropy_with_logits(confidence, hits, reduction="none")
            own_loss = missed if own_loss is None else own_loss + missed
        if own_loss is None:
            return scored
        weights = torch.cat([one.expand(n) for one, n in zip(scale, rows.counts, strict=True)])
        return scored._replace(loss=scored.loss + (torch.where(rows.teacher >= 0, own_loss, 0) * weights).sum())


class Trainer:
    """A run: everything its steps touch, restored from the newest whole checkpoint.

    Attributes:
        recipe, inputs, drafter, config: recipe, data, drafter and train section of the run.
        accelerator, engine, optimizer: accelerate's accelerator, DeepSpeed's engine, the wrapped torch optimiser.
        main: whether this is the rank that writes.
        shape, vocabulary, target: shape of the head, its draft vocabulary, frozen tensors of the target.
        dtype: type that is computed in; weights and their update are float32.
        stream: packed micro batches of all epochs.
        replayed, looping: the validation documents that acceptance is predicted on, and whether all of them loop.
        state: training state after the last step.
    """

    def __init__(self, recipe: Recipe, inputs: Inputs):
        self.recipe, self.inputs, self.config = recipe, inputs, recipe.train
        self.drafter = drafter_of(recipe.head)
        config = self.config
        token_survey = survey(
            inputs.train, inputs.spec.vocab_size, config.tokens_per_batch, self.drafter,
            read_categories(recipe.responses_dir("train")), config.epochs if self.drafter.draws else 1,
        )  # fmt: skip
        token_survey.check_mask_token(recipe.head)
        pieces = load_pieces(recipe.target_path, recipe.target.revision)
        draft = self._new_head(token_survey, pieces)
        module = LossModule(draft, config.objective, stops_at_rejection(recipe), config.temperature)
        self.accelerator = build_accelerator(config, module, str(recipe.run_dir))
        self.main, self.device = self.accelerator.is_main_process, self.accelerator.device
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        check_ranks({**inputs.identity, "draft vocabulary": artifacts.digest(self.vocabulary.d2t.tolist())})
        self.engine, self.optimizer = self.accelerator.prepare(module, build_optimizer(config, draft))
        self.stream = plan_stream(
            inputs.train,
            token_survey.windows,
            config.tokens_per_batch,
            config.seed,
            config.epochs,
            config.batches_per_step,
        )
        self.total_steps = len(self.stream) // config.batches_per_step
        if self.total_steps == 0:
            raise ValueError(
                f"{len(self.stream)} packed batches do not fill one optimiser step of train.batches_per_step "
                f"{config.batches_per_step}: harvest more data, raise train.epochs or lower train.tokens_per_batch"
            )
        self.feed = Feed()
        if isinstance(inputs.train, SpooledStates):
            self.feed = SpoolFeed(inputs.train, self.stream, config.batches_per_step, self.accelerator)
        self.target = frozen_target(pieces, self.vocabulary.target_ids, self.device, self.dtype)
        self.replayed, self.looping = replayed_documents(inputs.validation, self.drafter, recipe.eval.max_tokens)
        self.prefetch = Prefetch(self.stream, self._read, self.device)
        self.state = checkpoint.restore(recipe.run_dir, config, self.accelerator, self.engine, self.vocabulary)
        if config.tracker != "none":
            start_tracker(self.accelerator, recipe)  # the first that writes: a recipe that is refused leaves no run
        self._describe(token_survey)

    def fit(self, log: MetricsLog) -> None:
        """Take the remaining optimiser steps."""
        self.feed.release(self.state.step)
        if self.inputs.start is not None and self.state.step == 0:
            # What the head is worth that training goes on from: later validations are compared with it.
            log.validation(0, self.validate(self.weights()))
        with progress_bar(self.total_steps, "train", "step", initial=self.state.step, disable=not self.main) as bar:
            for step in range(self.state.step, self.total_steps):
                if self.state.without_rise == self.config.patience:  # never 0
                    logger.info(f"step {step:6d}  stopped: train.patience {self.config.patience} is used up")
                    self.feed.release(self.total_steps)  # nobody needs to harvest the rest
                    break
                # Online, the states of this step may not be written yet, or the harvester may need room to go on.
                if self.feed.wants_checkpoint(step):
                    self.save(step, self.weights())
                self.feed.wait(step)
                log.step(self.step(step), sum(w.num_tokens for windows in self.group(step) for w in windows))
                bar.update(1)

                # Now and then: measure, and keep the weights.
                if (step + 1) % self.config.checkpoint_every == 0 or step + 1 == self.total_steps:
                    weights = self.weights()
                    # Logged before the checkpoint: a run resumed from there does not validate it again.
                    log.validation(step + 1, self.validate(weights))
                    self.save(step + 1, weights, measured=True)
                    log.restart_clock(step + 1)

    def _read(self, windows: list[Window]) -> PackedBatch:
        """A micro batch on the host; called by the thread that reads ahead."""
        device_type = self.device.type
        batch = pack(self.inputs.train, windows, self.drafter, pin=device_type == "cuda")
        return batch.prepared(self.drafter.num_positions, device_type, self.drafter.computed_rows(batch.scored))

    def group(self, step: int) -> list[list[Window]]:
        """The packed micro batches of an optimiser step, of all ranks."""
        first = step * self.config.batches_per_step
        return self.stream[first : first + self.config.batches_per_step]

    def step(self, step: int) -> StepMetrics:
        """One optimiser step: this rank's micro batches of it, one update; metrics over all ranks, without rates.

        Raises:
            FloatingPointError: the loss or the gradient is not finite, on whichever rank.
        """
        config, ranks, K = self.config, self.accelerator.num_processes, self.drafter.num_positions
        first = step * config.batches_per_step
        mine = range(first + self.accelerator.process_index, first + config.batches_per_step, ranks)
        valid = [window.valid for windows in self.group(step) for window in windows]
        rows = torch.tensor(valid).sum(0).clamp_min(1)  # (K,)
        weights = self.drafter.position_weights()
        # DeepSpeed divides by accumulation steps and averages over ranks: undo both.
        scale = (weights / rows * config.batches_per_step).to(self.device, torch.float32, non_blocking=True)
        rate = schedule(self.optimizer, config, step, self.total_steps)

        sums = torch.zeros(2 * K, dtype=torch.float64, device=self.device)
        for index in mine:
            batch = self.prefetch.take(index).cast(self.dtype)
            if index + ranks in mine or (step + 1 < self.total_steps and self.feed.ready(step + 1)):
                self.prefetch.start(index + ranks)
            with self.accelerator.accumulate(self.engine):
                scored = self.engine(batch, self.target, scale)
                self.accelerator.backward(scored.loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            hits = first_choices(scored, batch, self.target).split(batch.layout.counts(K))
            sums += torch.cat([scored.position_sums, torch.stack([part.sum() for part in hits])])
        losses, accuracies = (self.accelerator.reduce(sums, "sum").cpu().view(2, K) / rows).unbind()
        metrics = StepMetrics(
            step=step + 1, loss=float((losses * weights).sum()), loss_per_step=tuple(losses.tolist()),
            accuracy_per_step=tuple(accuracies.tolist()), grad_norm=gradient_norm(self.engine), learning_rate=rate,
            memory_gib=peak_memory_gib(), acceptance_length=self.state.acceptance_length,
            acceptance_per_position=self.state.acceptance_per_position, acceptance_prompts=self.state.prompts,
        )  # fmt: skip
        if not (math.isfinite(metrics.loss) and 0 <= metrics.grad_norm < math.inf):  # DeepSpeed's -1 is NaN or infinite
            what = f"step {metrics.step} has loss {metrics.loss}, gradient norm {metrics.grad_norm}"
            self._stop(what, self.inputs.train, [window.document for index in mine for window in self.stream[index]])
        return metrics

    def _stop(self, what: str, store: States, documents: list[int]) -> None:
        """End a run before anything that is not finite is written; every rank calls this with the documents it read.

        A resumed run meets the same step again with the same weights: nothing else needs to be kept to look into it.
        """
        from accelerate.utils import gather_object

        read = (store[document] for document in documents)
        bad = [s.id for s in read if not all(part.isfinite().all() for part in (*s.aux.values(), s.last_hidden, s.lse))]
        names = ", ".join(sorted(set(gather_object(bad))))
        raise FloatingPointError(
            f"{what}, and is not kept. Sequences whose stored states are not finite: {names or 'none'}. Harvest them "
            "again; if there is none, lower train.learning_rate"
        )

    @torch.no_grad()
    def validate(self, weights: dict[str, Tensor]) -> Validation:
        """Replay drafting rounds over the validation split, each rank its share of the batches.

        A copy outside the engine computes: it needs no gathering.
        """
        accelerator, num_drafts = self.accelerator, self.recipe.eval.num_draft_tokens
        draft, config = frozen_copy(self.shape, weights, self.device, self.dtype), self.config
        module = LossModule(draft, config.objective, temperature=config.temperature)
        plan = plan_epoch(self.replayed, config.tokens_per_batch, 0, 0)
        nothing = torch.zeros(num_drafts, dtype=torch.float32, device=self.device)
        sums = torch.zeros(3 + num_drafts, dtype=torch.float64)
        for windows in plan[accelerator.process_index :: accelerator.num_processes]:
            batch = pack(self.inputs.validation, windows, self.drafter, whole_text=True)
            # As many as are served: in a block that looks in both directions a draft reads those behind it.
            batch = replace(batch, scored=batch.scored[:num_drafts]).to(self.device, self.dtype)
            scored = module(batch, self.target, nothing)
            drafts = scored.predictions.view(batch.scored.shape)
            rounds_of_batch = replayed(drafts, self.target.target_ids, batch, num_drafts, self.recipe.eval.max_tokens)
            first_step = float(scored.position_sums[0]), int(batch.scored[0].sum())
            sums += torch.tensor(
                [*first_step, rounds_of_batch.drafts, *rounds_of_batch.accepted_per_position], dtype=torch.float64
            )
        loss, counted, rounds, *accepted = accelerator.reduce(sums.to(self.device), "sum").cpu().tolist()
        if not math.isfinite(loss):
            what = f"the validation that follows step {self.state.step} has loss {loss / counted}"
            self._stop(what, self.inputs.validation, [window.document for window in self.replayed])
        pooled = Acceptance(int(rounds), tuple(map(int, accepted)))
        self.state = replace(
            self.state, acceptance_length=pooled.length, acceptance_per_position=pooled.rates,
            prompts=len(self.replayed), looping=self.looping,
        )  # fmt: skip
        return Validation(loss / counted, pooled.length, pooled.rates, int(rounds), len(self.replayed), self.looping)

    def save(self, step: int, weights: dict[str, Tensor], measured: bool = False) -> None:
        """Write a checkpoint, note whether it is the best of those that were measured, and apply retention."""
        state = replace(self.state, step=step, world_size=self.accelerator.num_processes, measured=measured)
        if measured:
            # Too few prompts decide nothing: the newest checkpoint counts as the best.
            rises = state.best_step == 0 or not state.acceptance_length <= state.best_acceptance_length
            if rises or few(state.prompts):
                state = replace(state, best_step=step, best_acceptance_length=state.acceptance_length, without_rise=0)
            else:
                state = replace(state, without_rise=state.without_rise + 1)
        self.state = state
        checkpoint.save(self.accelerator, self.engine, self.recipe.run_dir, self.state, weights)
        if self.main:
            checkpoint.retain(self.recipe.run_dir, self.config.keep_checkpoints, self.state)
        self.feed.release(step)

    def weights(self) -> dict[str, Tensor]:
        """What export reads of a checkpoint; every rank calls this."""
        weights = checkpoint.consolidated(self.accelerator, self.engine)
        return {**weights, "d2t": self.vocabulary.d2t, "t2d": self.vocabulary.t2d}

    def _new_head(self, token_survey: Survey, pieces: Any) -> DraftModule:
        """The head at step 0: made from its target, or with the weights of `train.init_from`."""
        recipe, inputs, config = self.recipe, self.inputs, self.config
        weights = inputs.start.weights() if inputs.start else {}
        self.vocabulary = draft_vocabulary(recipe, token_survey, weights.get("t2d"))
        head = recipe.head.sized(len(self.vocabulary.d2t))
        self.shape = draft_shape(head, inputs.spec, recipe.target.aux_layer_ids)
        if inputs.start:
            self.shape = replace(inputs.start.shape(inputs.spec), head=head)  # with the new run's settings of training
        draft = self.drafter.from_target(self.shape, pieces, self.vocabulary, config.seed)
        if inputs.start:
            load_trained(draft, self.vocabulary, weights)
        if config.zero_hidden_states:
            # fc is zero and stays zero, so the head ignores the states that it is given, in training and served. A mask
            # state learned through fc would let them through.
            nn.init.zeros_(draft.fc.weight)
            draft.fc.weight.register_hook(torch.zeros_like)
        draft.recompute = config.gradient_checkpointing
        return draft

    def _describe(self, token_survey: Survey) -> None:
        train, validation, per_step = self.inputs.train, self.inputs.validation, self.config.batches_per_step
        logger.info(
            f"{self.total_steps} steps of {per_step} packed batches ({len(self.stream) % per_step} fill no step); "
            f"{len(train)} sequences in {sum(not w.draw for w in token_survey.windows)} windows "
            f"({token_survey.num_without_loss} without a position to learn from); "
            f"draft vocabulary {len(self.vocabulary.d2t)} of {self.inputs.spec.vocab_size} "
            f"covers {coverage(token_survey.generated, self.vocabulary):.2%} of generated tokens; loss "
            f"{'up to the first rejected draft' if stops_at_rejection(self.recipe) else 'on all draft positions'}; "
            "acceptance is predicted on "
            f"{len(self.replayed)} of {len(validation)} validation responses (the others loop or are empty), the first "
            f"{self.recipe.eval.max_tokens} tokens of each"
        )
        for category, counts in sorted(token_survey.by_category.items()):
            logger.info(f"  {category:<20} {coverage(counts, self.vocabulary):.2%} of {int(counts.sum()):,}")


def first_choices(scored: HeadLoss, batch: PackedBatch, target: FrozenTarget) -> Tensor:
    """(M,) bool: scored rows where the draft's first choice is the target's, over the target's whole vocabulary."""
    met = batch.teachers(len(batch.scored))  # (M,), -1 where not scored, as predictions are
    choice = batch.argmax[met.clamp_min(0)]
    return (met >= 0) & (target.target_ids[scored.predictions.clamp_min(0)] == choice)


def replayed_documents(store: States, drafter: Drafter, max_tokens: int) -> tuple[list[Window], bool]:
    """The validation documents that are replayed, whole, since rounds cross windows, and whether all of them loop.

    Responses without a round, of less than two tokens, and those that loop in what evaluation would serve of them are
    left out, by its rule: the checkpoint that is picked is to be the one that evaluation would pick. Where all of them
    loop they are taken after all, as by the serving check of an export.

    Raises:
        ValueError: no response has a round.
    """
    texts = [(i, *store.tokens(i)) for i in range(len(store))]
    responses = [(i, mask, ids[last_response(mask, max_tokens)]) for i, ids, mask in texts]
    some = [response for response in responses if len(response[2]) > 1]
    straight = [response for response in some if not loops(response[2])]
    if not some:
        raise ValueError(
            f"none of the {len(texts)} validation responses has two tokens: no acceptance can be predicted, and no "
            "checkpoint be chosen; regenerate validation with other prompts"
        )
    return [whole(i, mask, drafter) for i, mask, _ in straight or some], not straight


def replayed(
    drafts: Tensor, target_ids: Tensor, batch: PackedBatch, num_drafts: int, max_tokens: int | None = None
) -> Acceptance:
    """Drafting rounds over every document of a batch.

    Args:
        drafts: (K, R) draft ids proposed from each row, -1 where none.
        target_ids: (D,) target id of every draft id.
        batch: T = 0 texts of the target, each continued past its stop.
        num_drafts: draft positions that are replayed.
        max_tokens: longest response; None: no limit.
    """
    matches = match_text(drafts, target_ids, batch.row_ids)[:num_drafts].cpu()
    generated, acceptance = batch.loss_mask.cpu(), empty_acceptance(num_drafts)
    for a, b in pairwise(batch.layout.cu_rows.tolist()):
        acceptance += replay(matches[:, a:b], generated[a:b], max_tokens)
    return acceptance
