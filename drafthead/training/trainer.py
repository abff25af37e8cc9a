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
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data.packing import Window, pack, plan_epoch, plan_stream, whole
from drafthead.data.responses import loops, read_categories
from drafthead.data.store import States
from drafthead.drafters.base import Drafter, DraftModule, draft_shape, frozen_copy, resized
from drafthead.drafters.batch import PackedBatch
from drafthead.drafters.recompute import give_back
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import Acceptance, empty_acceptance, last_answer, match_text, replay
from drafthead.drafters.vocabulary import DraftVocabulary, coverage
from drafthead.losses.fused import HeadLoss, Teacher, head_loss
from drafthead.progress import progress_bar
from drafthead.target.pieces import FrozenTarget, frozen_target, load_pieces
from drafthead.training import checkpoint
from drafthead.training.accelerator import accumulation_steps, build_accelerator
from drafthead.training.feed import Prefetch, build_feed
from drafthead.training.inputs import Inputs, Survey, draft_vocabulary, keep_start, open_inputs, survey
from drafthead.training.metrics import MetricsLog, StepMetrics, flatten, peak_memory_gib, start_tracker
from drafthead.training.optimizer import EMA_STATE, build_optimizer, gradient_norm, schedule

KIND = "run"
logger = logging.getLogger(__name__)
_LOG_LINES = 50  # a run prints about as many, whatever its length
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    accumulation_steps(recipe.train)  # a number of ranks that cannot share a step is refused before anything is read
    inputs = open_inputs(recipe)
    # One rank for all: the launcher ends the others with it.
    first = os.environ.get("RANK", "0") == "0"
    if artifacts.begin(recipe.run_dir, KIND, inputs.identity, thinned=True, alone=first):
        if first:
            logger.info("%s is complete; nothing to do", recipe.run_dir)
        return recipe.run_dir
    trainer = Trainer(recipe, inputs)
    log = MetricsLog(recipe.run_dir / "metrics.jsonl", trainer.state.step) if trainer.main else None
    trainer.fit(log)
    if log is not None:
        state = trainer.state
        counts = {**asdict(state), "total_steps": trainer.total_steps, "train_seconds": round(log.seconds(), 1)}
        artifacts.finish(recipe.run_dir, counts)
        logger.info(
            "best checkpoint: step %d, predicted acceptance length %.3f at K=%d", state.best_step,
            state.best_acceptance_length, recipe.eval.num_draft_tokens,
        )  # fmt: skip
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return recipe.run_dir


class LossModule(nn.Module):
    """What DeepSpeed wraps: the draft model's rows, scored against the target in one fused pass."""

    def __init__(
        self,
        draft: DraftModule,
        objective: Any = "forward_kl",
        zero_hidden_states: bool = False,
        recompute: bool = False,
    ):
        super().__init__()
        self.draft, self.objective = draft, objective
        self.zero_hidden_states, self.recompute = zero_hidden_states, recompute

    def forward(self, batch: PackedBatch, target: FrozenTarget, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss over the scored rows of a batch; `score` is the readable way to call this.

        Args:
            batch: T tokens.
            target: frozen tensors.
            scale: (K,) weight of one row's loss at each draft position, normalisation included.

        Returns:
            The fields of `HeadLoss` as a plain tuple: ZeRO-3 gathers weights for the backward through hooks on output
            tensors, and looks for them in tuples only.
        """
        if self.zero_hidden_states:
            batch = replace(batch, aux=torch.zeros_like(batch.aux))
        rows = self.draft.head_rows(batch, target.embeddings, len(scale), self.recompute)
        give_back(rows.states)  # what the steps freed, before the loss needs buffers
        teacher = Teacher(target.normed(batch.last_hidden), target.head_rows, batch.lse)
        scored = head_loss(rows, self.draft.lm_head.weight, teacher, scale, self.objective)
        give_back(rows.states)
        return scored.loss, scored.position_sums, scored.predictions


def score(module: nn.Module, batch: PackedBatch, target: FrozenTarget, scale: Tensor) -> HeadLoss:
    """Call a `LossModule`, or the engine that wraps one."""
    return HeadLoss(*module(batch, target, scale))


@dataclass(frozen=True)
class Validation:
    """Result of a pass over the validation split.

    Attributes:
        loss: mean loss of the first draft position per row; NaN when nothing was replayed.
        acceptance: pooled counters of the replayed rounds.
    """

    loss: float
    acceptance: Acceptance


class Trainer:
    """A run: everything its steps touch, restored from the newest whole checkpoint.

    Attributes:
        recipe, inputs, drafter, config: what is trained on what, and how.
        accelerator, engine, optimizer: accelerate's, DeepSpeed's and the wrapped torch optimiser.
        shape, vocabulary, target: of the head, d2t and t2d, frozen tensors.
        stream: packed micro batches of all epochs.
        replayed: the validation documents that acceptance is predicted on.
        state: where training stands.
    """

    def __init__(self, recipe: Recipe, inputs: Inputs):
        self.recipe, self.inputs, self.config = recipe, inputs, recipe.train
        self.drafter = drafter_of(recipe.head)
        config = self.config
        found = survey(
            inputs.train, inputs.spec.vocab_size, config.tokens_per_batch, self.drafter,
            read_categories(recipe.responses_dir("train")),
        )  # fmt: skip
        pieces = load_pieces(recipe.target_path, recipe.target.revision)
        draft = self._new_head(found, pieces)
        module = LossModule(draft, config.objective, config.zero_hidden_states, config.gradient_checkpointing)
        self.accelerator = build_accelerator(config, module, str(recipe.run_dir))
        checkpoint.check_ranks({**inputs.identity, "draft vocabulary": artifacts.digest(self.vocabulary.d2t.tolist())})
        if config.tracker != "none":
            start_tracker(self.accelerator, recipe)
        self.engine, self.optimizer = self.accelerator.prepare(module, build_optimizer(config, draft))
        if config.compile:
            self.engine.compile(compile_kwargs={"dynamic": True})  # every packed batch has lengths of its own
        self.stream = plan_stream(
            inputs.train, found.windows, config.tokens_per_batch, config.seed, config.epochs, config.batches_per_step
        )
        self.feed = build_feed(inputs.train, self.stream, config.batches_per_step, self.accelerator)
        self.target = frozen_target(pieces, inputs.spec, self.vocabulary.target_ids, self.device, self.dtype)
        self.replayed = replayed_documents(inputs.validation, self.drafter)
        self.prefetch = Prefetch(self.stream, lambda w: pack(inputs.train, w, self.drafter), self.device.type == "cuda")
        self.state = checkpoint.restore(recipe, self.accelerator, self.engine, self.vocabulary)
        if self.total_steps == 0:
            raise ValueError(
                f"{len(self.stream)} packed batches do not fill one optimiser step of train.batches_per_step "
                f"{config.batches_per_step}: harvest more data, raise train.epochs or lower train.tokens_per_batch"
            )
        if self.main:
            self._describe(found)

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in; weights and their update are float32 beside it."""
        return _DTYPES[self.config.precision]

    @property
    def total_steps(self) -> int:
        return len(self.stream) // self.config.batches_per_step

    def fit(self, log: MetricsLog | None) -> None:
        """Take the remaining optimiser steps; `log` on the rank that writes."""
        config, averaged = self.config, self.config.ema_decay is not None
        log_every = max(1, self.total_steps // _LOG_LINES)
        clock, tokens, start = time.perf_counter(), 0, self.state.step
        before = clock
        self.feed.release(self.state.step)
        if self.inputs.start is not None and self.state.step == 0:
            # What the head is worth that training goes on from: later validations are compared with it.
            result = self.validate(self.consolidated())
            length, rates = result.acceptance.length, result.acceptance.rates
            self.state = replace(self.state, acceptance_length=length, acceptance_per_position=rates)
            self._report(log, 0, result)
        with progress_bar(self.total_steps, "train", "step", initial=self.state.step, disable=log is None) as bar:
            for step in range(self.state.step, self.total_steps):
                # Online, the states of this step may not be written yet, or the harvester may need room to go on.
                if self.feed.wants_checkpoint(step):
                    self.save(step, self.consolidated(averaged), None)
                self.feed.wait(step)
                metrics, step_tokens = self.step(step)
                tokens += step_tokens
                now = time.perf_counter()
                seconds, step_seconds, before = now - clock, now - before, now
                metrics = replace(
                    metrics,
                    step_seconds=step_seconds,
                    tokens_per_second=tokens / seconds,
                    eta_seconds=seconds / (step + 1 - start) * (self.total_steps - step - 1),
                    acceptance_length=self.state.acceptance_length,
                    acceptance_per_position=self.state.acceptance_per_position,
                )
                if log is not None:
                    log.write_step(metrics)
                    shown = {"loss": f"{metrics.loss:.3f}", "top1": f"{metrics.accuracy_per_step[0]:.3f}"}
                    bar.set_postfix(shown, refresh=False)
                    if (step + 1) % log_every == 0 or step + 1 == self.total_steps:
                        logger.info(metrics.line())
                self.track(asdict(metrics), "train", step + 1)
                bar.update(1)

                # Now and then: measure, and keep the weights.
                if (step + 1) % config.checkpoint_every == 0 or step + 1 == self.total_steps:
                    weights = self.consolidated(averaged)
                    result = self.validate(weights)
                    # Before the checkpoint: a run resumed from there does not validate it again.
                    self._report(log, step + 1, result)
                    self.save(step + 1, weights, result)
                    clock, tokens, start = time.perf_counter(), 0, step + 1

    def step(self, step: int) -> tuple[StepMetrics, int]:
        """One optimiser step: this rank's micro batches of it, one update.

        Returns:
            Metrics over all ranks (rate still zero) and the step's tokens over all ranks.
        """
        config, ranks, K = self.config, self.accelerator.num_processes, self.drafter.num_positions
        first = step * config.batches_per_step
        group = self.stream[first : first + config.batches_per_step]
        mine = range(first + self.accelerator.process_index, first + config.batches_per_step, ranks)
        rows = torch.tensor([window.valid for windows in group for window in windows]).sum(0).clamp_min(1)  # (K,)
        weights = self.drafter.position_weights()
        # DeepSpeed divides by accumulation steps and averages over ranks: undo both.
        scale = (weights / rows * config.batches_per_step).to(self.device, torch.float32)
        rate = schedule(self.optimizer, config, step, self.total_steps)

        sums, losses_of = torch.zeros(2 * K, dtype=torch.float64, device=self.device), {}
        for index in mine:
            batch = self.prefetch.take(index).to(self.device, self.dtype)
            if index + ranks in mine or (step + 1 < self.total_steps and self.feed.ready(step + 1)):
                self.prefetch.start(index + ranks)
            with self.accelerator.accumulate(self.engine):
                scored = score(self.engine, batch, self.target, scale)
                self.accelerator.backward(scored.loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses_of[index] = scored.position_sums
            sums += torch.cat([scored.position_sums, self._hits(scored, batch)])
        # The only time in a step that the host waits for the device. What is not finite has changed nothing: the
        # optimiser refuses such a gradient.
        sums = self.accelerator.reduce(sums, "sum").cpu()
        if not torch.isfinite(sums[:K]).all():
            self._stop_on_nonfinite_loss(step, losses_of)
        grad_norm = gradient_norm(self.engine)
        self._stop_unless_finite_gradient(step, group, grad_norm)
        losses, hits = sums[:K] / rows, sums[K : 2 * K] / rows
        metrics = StepMetrics(
            step=step + 1, loss=float((losses * weights).sum()), loss_per_step=tuple(losses.tolist()),
            accuracy_per_step=tuple(hits.tolist()), grad_norm=grad_norm, learning_rate=rate, tokens_per_second=0.0,
            memory_gib=peak_memory_gib(),
        )  # fmt: skip
        return metrics, sum(window.num_tokens for windows in group for window in windows)

    def _hits(self, scored: HeadLoss, batch: PackedBatch) -> Tensor:
        """(K,) scored rows where the draft's first choice is the target's, over the target's whole vocabulary."""
        predictions = scored.predictions.view(batch.scored.shape)
        proposed = torch.where(predictions >= 0, self.target.target_ids[predictions.clamp_min(0)], -1)
        choice = torch.where(batch.of_row >= 0, batch.argmax[batch.of_row.clamp_min(0)], -2)  # (R,)
        # Draft position k of row t is compared with the target's choice at t + 1 + k; rows not scored hold -1.
        wanted = torch.stack([torch.roll(choice, -1 - k) for k in range(len(proposed))])
        return (proposed == wanted).sum(1)

    @torch.no_grad()
    def validate(self, weights: dict[str, Tensor]) -> Validation:
        """Replay drafting rounds over the validation split, each rank its share of the batches.

        A copy outside the engine computes: it needs no gathering, and the moving average can be judged as well.
        """
        K, accelerator = self.drafter.num_positions, self.accelerator
        draft = frozen_copy(self.shape, weights, self.device, self.dtype)
        module = LossModule(draft, self.config.objective, self.config.zero_hidden_states)
        plan = plan_epoch(self.replayed, self.config.tokens_per_batch, 0, 0)
        nothing = torch.zeros(K, dtype=torch.float32, device=self.device)
        total, counted, acceptance = 0.0, 0, empty_acceptance(self.recipe.eval.num_draft_tokens)
        for windows in plan[accelerator.process_index :: accelerator.num_processes]:
            batch = pack(self.inputs.validation, windows, self.drafter, whole_text=True).to(self.device, self.dtype)
            scored = score(module, batch, self.target, nothing)
            total += float(scored.position_sums[0])
            counted += int(batch.scored[0].sum())
            acceptance += replayed(
                scored.predictions.view(batch.scored.shape), self.target.target_ids, batch, acceptance
            )
        counts = torch.tensor(
            [total, counted, acceptance.drafts, *acceptance.accepted_per_position], dtype=torch.float64
        )
        total, counted, drafts, *accepted = accelerator.reduce(counts.to(self.device), "sum").cpu().tolist()
        pooled = Acceptance(int(drafts), tuple(int(n) for n in accepted))
        return Validation(total / counted if counted else math.nan, pooled)

    def save(self, step: int, weights: dict[str, Tensor], result: Validation | None) -> None:
        """Write a checkpoint, note whether it is the best so far (None: not measured), and apply retention."""
        best = self.state
        if result is None:
            length, rates, improved = best.acceptance_length, best.acceptance_per_position, False
        else:
            length, rates = result.acceptance.length, result.acceptance.rates
            # Where every validation response loops, lengths are NaN and the newest checkpoint counts as the best.
            improved = best.best_step == 0 or not length <= best.best_acceptance_length
        self.state = checkpoint.TrainState(
            step=step,
            world_size=self.accelerator.num_processes,
            zero_stage=self.config.zero_stage,
            acceptance_length=length,
            acceptance_per_position=rates,
            best_step=step if improved else best.best_step,
            best_acceptance_length=length if improved else best.best_acceptance_length,
        )
        checkpoint.save(self.accelerator, self.engine, self.recipe.run_dir, self.state, weights)
        if self.main:
            checkpoint.retain(self.recipe.run_dir, self.config.keep_checkpoints, self.state)
        self.feed.release(step)

    def consolidated(self, averaged: bool = False) -> dict[str, Tensor]:
        """float32 weights on the CPU under their exported names, with d2t and t2d. Every rank calls this.

        Args:
            averaged: the moving average (train.ema_decay) instead of the weights that are trained.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        weights = {}
        for name, parameter in self.accelerator.unwrap_model(self.engine).draft.named_parameters():
            if averaged:
                kept = safe_get_full_optimizer_state(parameter, EMA_STATE)
                full = self.engine.optimizer.state[parameter][EMA_STATE] if kept is None else kept
            else:
                master = safe_get_full_fp32_param(parameter)
                full = parameter if master is None else master  # without a ZeRO optimiser the parameter is the master
            weights[name] = full.detach().float().cpu().clone()
        return {**weights, "d2t": self.vocabulary.d2t, "t2d": self.vocabulary.t2d}

    def track(self, values: dict[str, Any], group: str, step: int) -> None:
        """Send numbers to the recipe's tracker, if it has one."""
        if self.config.tracker != "none":
            self.accelerator.log(flatten(values, group), step=step)

    def _new_head(self, found: Survey, pieces: Any) -> DraftModule:
        """The head at step 0: made from its target, or with the weights and the vocabulary of `train.init_from`."""
        recipe, inputs, config = self.recipe, self.inputs, self.config
        shape = draft_shape(recipe.head, inputs.spec, recipe.target.aux_layer_ids)
        if inputs.start is None:
            self.vocabulary = draft_vocabulary(recipe, found)
            self.shape = resized(shape, len(self.vocabulary.d2t))
            draft = self.drafter.from_target(self.shape, pieces, self.vocabulary, config.seed)
        else:
            start = keep_start(recipe, inputs.start)
            weights = start.weights()
            self.vocabulary = DraftVocabulary(weights["d2t"], weights["t2d"])
            self.shape = start.shape(resized(shape, len(self.vocabulary.d2t)))
            draft = self.drafter.build(self.shape)
            draft.load_state_dict({name: weights[name] for name in weights if name not in ("d2t", "t2d")})
        if config.zero_hidden_states:
            # Trained on zeroed states fc stays zero, so the served head ignores the states it is given, as it did in
            # training; a random fc would feed it noise.
            nn.init.zeros_(draft.fc.weight)  # type: ignore[arg-type]
        return draft

    def _describe(self, found: Survey) -> None:
        config, stream = self.config, self.stream
        silent = f", {found.silent} without a position to learn from" if found.silent else ""
        logger.info(
            f"{self.total_steps} steps of {config.batches_per_step} packed batches; {len(self.inputs.train)} sequences "
            f"in {len(found.windows)} windows{silent}; draft vocabulary {len(self.vocabulary.d2t)} of "
            f"{self.inputs.spec.vocab_size} covers {coverage(found.generated, self.vocabulary):.2%} of generated tokens"
        )
        if left_over := len(stream) % config.batches_per_step:
            logger.info(
                f"the last {left_over} of {len(stream)} packed batches do not fill a step and are not trained on"
            )
        for category, counts in sorted(found.by_category.items()):
            logger.info(f"  {category:<20} {coverage(counts, self.vocabulary):.2%} of {int(counts.sum()):,}")
        if looping := len(self.inputs.validation) - len(self.replayed):
            logger.info(
                f"{looping} of {len(self.inputs.validation)} validation responses loop or are empty: left out of "
                "acceptance, as they are in evaluation"
            )

    def _report(self, log: MetricsLog | None, step: int, result: Validation) -> None:
        acceptance = result.acceptance
        values = {
            "first_step_loss": result.loss,
            "acceptance_length": acceptance.length,
            "acceptance_per_position": acceptance.rates,
            "rounds": acceptance.drafts,
        }
        self.track(values, "validation", step)
        if log is None:
            return
        log.write("validation", {"step": step, **values})
        rates = " ".join(f"{rate:.3f}" for rate in acceptance.rates)
        logger.info(
            f"step {step:6d}  validation: acceptance length {acceptance.length:.3f} (replay of {acceptance.drafts} "
            f"rounds), per position {rates}, first-step loss {result.loss:.4f}"
        )

    # A loss or gradient that is not finite stops the run before it reaches the weights. Under runs/NAME/nonfinite/
    # step_N lie the weights that met the step and the sequences of it. DeepSpeed leaves the weights alone when the
    # gradient norm is not finite, except at ZeRO 0, where a hook of training.optimizer does.

    def _stop_on_nonfinite_loss(self, step: int, losses_of: dict[int, Tensor]) -> None:
        """Name the micro batches: `losses_of` has the sums (K,) of this rank's, by their place in the stream."""
        from accelerate.utils import gather_object

        mine = []
        for index, sums in losses_of.items():
            if torch.isfinite(sums).all():
                continue
            batch = pack(self.inputs.train, self.stream[index], self.drafter)
            finite = {name: bool(torch.isfinite(getattr(batch, name)).all()) for name in ("aux", "last_hidden")}
            losses = [str(value) for value in sums.tolist()]
            mine.append({"ids": batch.ids, "loss_per_step": losses, "inputs_finite": finite})
        batches = gather_object(mine)
        folder = self._keep_nonfinite(step, {"what": "loss", "batches": batches})
        raise FloatingPointError(
            f"the loss at step {step + 1} is not finite ({len(batches)} micro batches; stored states finite: "
            f"{[b['inputs_finite'] for b in batches]}). Nothing was updated; weights and sequences are in {folder}. "
            "Harvest those sequences again if their states are not finite, else lower train.learning_rate"
        )

    def _stop_unless_finite_gradient(self, step: int, group: list[list[Window]], grad_norm: float) -> None:
        if math.isfinite(grad_norm):
            return
        ids = sorted({self.inputs.train[window.document].id for windows in group for window in windows})
        folder = self._keep_nonfinite(step, {"what": "gradient", "batches": [{"ids": ids}]})
        raise FloatingPointError(
            f"gradient norm {grad_norm} at step {step + 1} with finite losses. Nothing was updated; weights and "
            f"sequences are in {folder}. Lower train.learning_rate"
        )

    def _keep_nonfinite(self, step: int, record: dict[str, Any]) -> Path:
        folder = self.recipe.run_dir / "nonfinite" / f"step_{step + 1:08d}"
        weights = self.consolidated()
        if self.main:
            checkpoint.write_weights(folder / checkpoint.MODEL_FILE, weights)
            checkpoint.write_json(folder / "record.json", {"step": step + 1, **record})
        self.accelerator.wait_for_everyone()
        return folder


def replayed_documents(store: States, drafter: Drafter) -> list[Window]:
    """The validation documents that are replayed, whole, since rounds cross windows.

    Empty responses and those that loop are left out, by the rule by which evaluation leaves them out: the checkpoint
    that is picked is to be the one that evaluation would pick.
    """
    texts = (store.tokens(i) for i in range(len(store)))
    return [
        whole(i, mask, drafter)
        for i, (ids, mask) in enumerate(texts)
        if mask.any() and not loops(ids[last_answer(mask)])
    ]


def replayed(drafts: Tensor, target_ids: Tensor, batch: PackedBatch, like: Acceptance) -> Acceptance:
    """Drafting rounds over every document of a batch.

    Args:
        drafts: (K, R) draft ids proposed from each row, -1 where none.
        target_ids: (D,) target id of every draft id.
        batch: T = 0 texts of the target, each continued past its stop.
        like: as many draft positions as this one has are replayed.
    """
    num_drafts = len(like.accepted_per_position)
    matches = match_text(drafts, target_ids, batch.row_ids)[:num_drafts].cpu()
    generated, found = batch.loss_mask.cpu(), empty_acceptance(num_drafts)
    for a, b in pairwise(batch.layout.cu_rows.tolist()):
        found += replay(matches[:, a:b], generated[a:b])
    return found
