"""The recipe's section on a training run."""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator

from drafthead.section import Section, Seed

# The keys of drafthead.losses.objectives.OBJECTIVES.
ObjectiveName = Literal["forward_kl", "total_variation", "lk_hybrid", "cross_entropy"]
Mixture = Annotated[dict[ObjectiveName, PositiveFloat], Field(min_length=1)]
Objective = Annotated[
    Annotated[ObjectiveName, Tag("name")] | Annotated[Mixture, Tag("mixture")],
    Discriminator(lambda value: "mixture" if isinstance(value, dict) else "name"),
]


class TrainConfig(Section):
    """One training run."""

    init_from: str | None = None  # runs/OTHER, or one of its checkpoints, below output_dir; None: from the target
    objective: Objective = "forward_kl"  # or a weighted sum: {forward_kl: 0.9, total_variation: 0.1}
    temperature: float = Field(default=1.0, gt=0)  # of target and draft in the objective
    # true: loss up to the first rejected draft of each root; false: on all positions; None: as the drafter is best.
    rejection: bool | None = None
    epochs: int = Field(default=1, gt=0)
    tokens_per_batch: int = Field(gt=0)  # one packed micro batch on one rank
    # Micro batches of one optimiser step over all ranks; accumulation follows from the number of ranks, so the
    # same recipe takes the same steps on any machine.
    batches_per_step: int = Field(default=1, gt=0)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices between hidden states; the rest stays AdamW
    learning_rate: float = Field(gt=0)
    muon_learning_rate: float = Field(default=0.02, gt=0)  # in units of spectral norm per step
    decay_ratio: float | None = Field(default=None, gt=0, le=1)  # WSD over the last share of steps; None: cosine
    precision: Literal["fp32", "bf16"] = "bf16"
    zero_stage: Literal[0, 1, 2, 3] = 1
    gradient_checkpointing: bool = False  # recompute draft steps in the backward: less memory, about a third more work
    # On CUDA: a resumed run repeats the undisturbed one to the last bit, as it does on CPU in any case; slower.
    deterministic: bool = False
    checkpoint_every: int = Field(gt=0)  # optimiser steps; also when validation runs
    # Stop when the replayed acceptance length has not risen at so many validations; None: all steps are taken.
    patience: int | None = Field(default=None, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    zero_hidden_states: bool = False  # control experiment: hide the target's states from the head
    seed: Seed = 0

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        # With bf16 DeepSpeed starts Adam's bias correction a step off; with Muon no gradient norm is checked.
        if self.zero_stage == 0 and (self.precision, self.optimizer) != ("fp32", "adamw"):
            raise ValueError(
                f"train.zero_stage 0 needs train.precision fp32 (not {self.precision}) and train.optimizer adamw (not "
                f"{self.optimizer}): set train.zero_stage to 1 or higher"
            )
        return self
