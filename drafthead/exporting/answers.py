"""The validation answers that a head is judged on before it is served, and drafting rounds replayed over them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead import provenance
from drafthead.config import Recipe
from drafthead.data import store as state_store
from drafthead.data.responses import loops
from drafthead.data.store import StateStore
from drafthead.drafters.base import DraftShape, frozen_copy
from drafthead.drafters.replay import Acceptance
from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.exporting.replay import Answer, first_answers, fitting_answers, predicted_rounds
from drafthead.target.pieces import load_pieces

PROMPTS, TOKENS = 32, 32768  # at most


@dataclass(frozen=True)
class ValidationAnswers:
    """T = 0 answers of the target with the states behind them.

    Attributes:
        store: that holds them.
        chosen: which of its documents.
        embeddings: (V, H) of the target.
        num_drafts: K to be served.
        looping: answers passed over because they go in circles, as in training and evaluation (data.responses).
    """

    store: StateStore
    chosen: list[Answer]
    embeddings: Tensor
    num_drafts: int
    looping: int

    def rounds(self, weights: dict[str, Tensor], shape: DraftShape) -> list[Acceptance]:
        """Drafting rounds of a head over every answer, in float32.

        Args:
            weights: with d2t and t2d.
            shape: of the head.
        """
        model = frozen_copy(shape, weights, torch.device("cpu"), torch.float32)
        ids = DraftVocabulary(weights["d2t"], weights["t2d"]).target_ids
        indices = [answer.index for answer in self.chosen]
        return [predicted_rounds(model, self.embeddings, ids, self.store, i, self.num_drafts) for i in indices]


def validation_answers(
    recipe: Recipe, aux_layer_ids: tuple[int, ...], prompts: int = PROMPTS, tokens: int = TOKENS
) -> ValidationAnswers:
    """The first answers of the validation split that the engine has room for and that do not loop.

    Where all of them loop they are taken after all: that an engine serves what was trained shows on them too.

    Args:
        recipe: target, engine, validation states and K.
        aux_layer_ids: that the head was trained on.
        prompts, tokens: at most so many.

    Raises:
        ArtefactError: there are no validation states, they hold other aux layers, or none of them fits.
    """
    store = _store(recipe, aux_layer_ids)
    K = recipe.eval.num_draft_tokens
    fitting = fitting_answers(store, recipe.engine.max_model_len - K - 1)
    straight = [answer for answer in fitting if not loops(answer.answer_ids)] or fitting
    if not fitting:
        raise provenance.ArtefactError(
            f"no answer of {recipe.states_dir('validation')} fits engine.max_model_len {recipe.engine.max_model_len}; "
            "raise it, or export with --no-serve-check"
        )
    pieces = load_pieces(recipe.target_path, recipe.target.revision)
    chosen = first_answers(straight, prompts, tokens)
    return ValidationAnswers(store, chosen, pieces.embed_tokens, K, len(fitting) - len(straight))


def _store(recipe: Recipe, aux_layer_ids: tuple[int, ...]) -> StateStore:
    directory = recipe.states_dir("validation")
    command = "python data_gen/harvest.py RECIPE (or export with --no-serve-check)"
    provenance.require(directory, state_store.KIND, command)
    store = StateStore(directory)
    if tuple(store.aux_layer_ids) != aux_layer_ids:
        raise provenance.ArtefactError(
            f"{directory} holds layers {store.aux_layer_ids}, the head was trained on {list(aux_layer_ids)}; harvest "
            "again under another name (name=...), or export with --no-serve-check"
        )
    return store
