"""What runs inside a contestant's process when it trains: stretches of optimiser steps, when the referee asks for one.

Documents come from a store of ours, in the order that our packing gives. A peer gets those of a stretch in its own
form before the clock starts; ours reads them as its trainer does, on the clock. After a stretch the weights are
written under the names of an exported EAGLE-3 head, and beside them what the contestant's own model drafts for one
validation document: the referee's replay of those weights has to draft the same.

Shapes: T tokens of a document, N aux layers, H hidden, K draft positions.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafthead.data.store import StateStore
from stepbench.shapes import Shape

DRAFTS = "own_drafts"  # beside the weights, (K, T): draft ids from every root
EMBEDDING = "embed_tokens"


@dataclass(frozen=True)
class Plan:
    """What everybody trains on.

    Attributes:
        shape: shape of the head.
        recipe, overrides: recipe and overrides of our run.
        train, validation: directories of the states.
        steps: documents of every optimiser step.
        checked: index of the validation document that is drafted for.
        learning_rate: learning rate of AdamW in the variant `same`.
    """

    shape: Shape
    recipe: str
    overrides: list[str]
    train: str
    validation: str
    steps: list[list[int]]
    checked: int
    learning_rate: float

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        read = json.loads(path.read_text())
        return cls(**read | {"shape": Shape(**read["shape"])})


class Trainee(Protocol):
    """A contestant's trainer.

    Attributes:
        head: norms of the contestant's head that the recipe's may lack, by key of the head section.
        rope: rotation of the contestant's head, as in a config.json.
    """

    head: dict[str, bool]
    rope: dict[str, Any]

    def prepare(self, step: int) -> Any:
        """What `step` takes, made before the clock starts."""

    def step(self, batch: Any) -> None:
        """One optimiser step."""

    def weights(self) -> dict[str, Tensor]:
        """Under the names of an exported head."""

    def drafts(self) -> Tensor | None:
        """(K, T) what its own model drafts for the checked document; None: it is the model that replays."""


def run(trainee: Trainee, questions: Iterable[str], answer: Callable[[dict], None]) -> None:
    """A stretch for every line, which has its number of steps and the file for the weights."""
    done = 0
    for line in questions:
        asked = json.loads(line)
        batches = [trainee.prepare(step) for step in range(done, done + asked["steps"])]
        start = time.perf_counter()
        for batch in batches:
            trainee.step(batch)
        seconds = time.perf_counter() - start
        done += asked["steps"]
        with torch.no_grad():
            drafts = trainee.drafts()
        extra = {} if drafts is None else {DRAFTS: drafts}
        save_file({k: v.contiguous() for k, v in {**trainee.weights(), **extra}.items()}, asked["write"])
        answer({"seconds": seconds})


class Documents:
    """The stored documents as both peers read theirs: float32, one row per token."""

    def __init__(self, directory: str):
        self._store = StateStore(Path(directory))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """input_ids and loss_mask (T,), aux (T, N * H), last_hidden (T, H); zeros where the store has no teacher row.

        A row without a teacher has no loss in either peer.
        """
        stored = self._store[index]
        last_hidden = torch.zeros(stored.num_tokens, stored.last_hidden.shape[1])
        last_hidden[stored.first_teacher_row :] = stored.last_hidden.float()
        return {
            "input_ids": stored.input_ids.long(),
            "loss_mask": (stored.loss_mask > 0).long(),
            "aux": torch.cat([stored.aux[layer].float() for layer in self._store.aux_layer_ids], dim=-1),
            "last_hidden": last_hidden,
        }
