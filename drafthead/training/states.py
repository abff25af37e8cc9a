"""Opening the states of a split: a whole store, or the spool of online training."""

import os
from dataclasses import dataclass
from typing import Any

from drafthead import provenance
from drafthead.config import Recipe
from drafthead.data import spool as spools
from drafthead.data import store as state_store
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.responses import ResponseTokens
from drafthead.data.spool import SpooledStates
from drafthead.data.store import States, StateStore
from drafthead.progress import wait_until

_HARVEST = "python data_gen/harvest.py RECIPE"


@dataclass(frozen=True)
class Opened:
    """States of a split.

    Attributes:
        states: to be read.
        identity: what they are made from.
        reference: what a run writes into its own identity; a spool's is its identity, as its shards come and go.
    """

    states: States
    identity: dict[str, Any]
    reference: Any


def open_states(recipe: Recipe, split: str) -> Opened:
    """Open a split's states; online, wait until the harvester has got that far.

    Raises:
        ArtefactError: states or responses are missing or unfinished, or the directory holds the other kind.
    """
    online = recipe.states.spool_shards is not None
    directory = recipe.states_dir(split)
    kind = spools.KIND if online and split == "train" else state_store.KIND
    if online:
        awaited = directory / (provenance.IDENTITY if split == "train" else provenance.MANIFEST)
        what = f"the harvester to write {awaited}; if it is not running: {_HARVEST}"
        wait_until(awaited.exists, what, quiet=os.environ.get("RANK", "0") != "0")
    _check_kind(recipe, split, kind)
    if kind == state_store.KIND:
        manifest = provenance.require(directory, kind, _HARVEST)
        if stray := {path.name for path in directory.glob("shard-*.safetensors")} - manifest["files"].keys():
            raise provenance.ArtefactError(
                f"{directory} holds {min(stray)}, which its {provenance.MANIFEST} does not list: it belongs to another "
                "harvest; move it away"
            )
        return Opened(StateStore(directory), manifest["identity"], provenance.reference(manifest))
    identity = provenance.read_json(directory / provenance.IDENTITY)
    made_from = provenance.require(recipe.responses_dir(split), RESPONSES, "python data_gen/regenerate.py RECIPE")
    wanted = {**spools.terms(recipe), "responses": provenance.reference(made_from)}
    found = {name: identity[name] for name in wanted}
    if found != wanted:
        raise provenance.ArtefactError(
            f"{directory} does not fit the recipe:\n{provenance.describe_difference(found, wanted)}\n"
            f"delete {directory}, or give the recipe another name (name=...)"
        )
    texts = ResponseTokens(recipe.responses_dir(split))
    spool = spools.open_spool(recipe, len(texts))
    return Opened(
        SpooledStates(spool, texts, recipe.states.sequences_per_shard, identity["aux_layer_ids"]), identity, identity
    )


def _check_kind(recipe: Recipe, split: str, wanted: str) -> None:
    directory = recipe.states_dir(split)
    if not (directory / provenance.IDENTITY).exists():
        return  # said by whoever needs it
    found = provenance.read_json(directory / provenance.IDENTITY)["kind"]
    if {found, wanted} == {spools.KIND, state_store.KIND}:
        named = {spools.KIND: "a spool of online training", state_store.KIND: "a whole store of states"}
        raise provenance.ArtefactError(
            f"{directory} is {named[found]}, but states.spool_shards {recipe.states.spool_shards} asks for "
            f"{named[wanted]}: restore the setting, delete {directory} and harvest again, or give the recipe another "
            "name (name=...)"
        )
