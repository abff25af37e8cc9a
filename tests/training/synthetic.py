"""Hidden states that no target computed, of texts that are quickly learnt, and a recipe small enough for them."""

from pathlib import Path

import torch

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data import spool as spools
from drafthead.data.shard import StateSequence, shard_path, write_shard
from drafthead.data.spool import Spool, open_spool
from drafthead.data.store import KIND
from drafthead.target.pieces import TargetHead, load_pieces
from drafthead.target.spec import load_target_spec, target_identity
from tests.artifacts import response, write_response_artifact
from tests.recipes import SMALL_HEAD, tiny_recipe

SMALL = (
    *SMALL_HEAD, "target.aux_layer_ids=[2,4,8]", "head.num_ttt_steps=3", "train.tokens_per_batch=96", "train.epochs=1",
    "train.checkpoint_every=4", "train.learning_rate=3e-3", "train.optimizer=adamw",
)  # fmt: skip


def small_recipe(output_dir: Path, *overrides: str) -> Recipe:
    return tiny_recipe(output_dir, *SMALL, *overrides)


def synthetic_store(recipe: Recipe, split: str, count: int, seed: int, **texts: int) -> None:
    """A whole store of `synthetic_sequences`, in one shard."""
    sequences = synthetic_sequences(recipe, split, count, seed, **texts)
    spec = load_target_spec(recipe.target_path)
    directory = recipe.states_dir(split)
    identity = {
        "target": target_identity(recipe, spec), "aux_layer_ids": list(recipe.target.aux_layer_ids),
        "dtype": recipe.target.dtype, "made": "synthetic",
        **recipe.states.model_dump(include={"format", "prompt_loss"}),
    }  # fmt: skip
    assert not artifacts.begin(directory, KIND, identity)
    write_shard(shard_path(directory, 0), sequences, spec.num_layers, recipe.states.format)
    artifacts.finish(directory, {"sequences": len(sequences)})


def synthetic_stores(recipe: Recipe, train: int, validation: int) -> None:
    """Both splits, of so many sequences."""
    synthetic_store(recipe, "train", train, seed=0)
    synthetic_store(recipe, "validation", validation, seed=1)


def synthetic_sequences(
    recipe: Recipe,
    split: str,
    count: int,
    seed: int,
    poisoned: int | None = None,
    period: int = 64,
    infinite: int | None = None,
) -> list[StateSequence]:
    """ResponseTokens in which a token decides the next one, and states from which the target's head reads it off.
    Texts repeat themselves after `period` tokens; one may have a state that is no number, or an infinite lse."""
    pieces = load_pieces(recipe.target_path)
    head = TargetHead(pieces, torch.float32)
    rows = pieces.lm_head.float()
    # Tokens that their own row of lm_head predicts, so that the text is what the target would say.
    predicts_itself = (rows @ rows.T).argmax(1) == torch.arange(len(rows))
    alphabet = predicts_itself.nonzero()[:64, 0]
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for i in range(count):
        length = int(torch.randint(16, 40, (1,), generator=generator))
        first = int(torch.randint(0, 64, (1,), generator=generator))
        tokens = alphabet[(torch.arange(length + 1) % period * 7 + first) % 64]
        states = rows[tokens[1:]] / pieces.final_norm.float()  # the final norm multiplies its weight back in
        states = torch.nn.functional.normalize(states, dim=-1) * pieces.spec.hidden_size**0.5
        states = states + 0.02 * torch.randn(states.shape, generator=generator)
        mask = torch.ones(length, dtype=torch.uint8)
        mask[:4] = 0
        mask[-4:] = 0  # said after the stop
        argmax, lse = head.stats(states)
        aux = {layer_id: (states * (1 + layer_id)).bfloat16() for layer_id in recipe.target.aux_layer_ids}
        if i == poisoned:
            aux[recipe.target.aux_layer_ids[0]][5, 7] = float("nan")
        if i == infinite:
            lse[5] = float("inf")
        name = f"{split}{i:04d}"
        sequences.append(StateSequence(name, tokens[:-1].int(), mask, aux, states.bfloat16(), argmax, lse))
    return sequences


def claim_spool(recipe: Recipe, sequences: list[StateSequence]) -> Spool:
    """Responses that say what the sequences say, and an empty spool made from them."""
    responses = [response(s.id, 4, s.num_tokens - 8, 4, ids=s.input_ids.tolist()) for s in sequences]
    made_from = write_response_artifact(recipe.responses_dir("train"), responses)
    identity = {
        **spools.terms(recipe), "responses": made_from, "aux_layer_ids": list(recipe.target.aux_layer_ids),
        "target": target_identity(recipe, load_target_spec(recipe.target_path)), "dtype": recipe.target.dtype,
        **recipe.states.model_dump(include={"format", "prompt_loss"}),
    }  # fmt: skip
    artifacts.begin(recipe.states_dir("train"), spools.KIND, identity)
    return open_spool(recipe, len(sequences))
