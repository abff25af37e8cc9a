"""What a run starts from: verified states, the draft vocabulary, and the weights it begins with.

Weights begin with the target's rows, or with another run's checkpoint (`train.init_from`):

    runs/NAME/start/model.safetensors     a copy of those weights: the run needs its ancestor no more
    runs/NAME/training_prompts.json       prompts that the ancestor is known to have learned from

Only weights are taken over: draft vocabulary, rotary embedding and norms belong to them, while optimiser, schedule
and order of the data are the new run's own. The copy costs a checkpoint's weights on disk; without it a run could
not be resumed once its ancestor has been deleted.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data import spool as spools
from drafthead.data import store as state_store
from drafthead.data.packing import Window, cut
from drafthead.data.prompts import ids_of
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.responses import ResponseTokens
from drafthead.data.spool import SpooledStates, States
from drafthead.data.store import StateStore
from drafthead.data.trained_on import known_before, write_trained_on
from drafthead.drafters.base import Drafter, DraftShape
from drafthead.drafters.trained import MODEL_FILE, OWN, Checkpoint, best_checkpoint, read_checkpoint
from drafthead.drafters.vocabulary import DraftVocabulary, choose_vocabulary, size_for_coverage
from drafthead.files import atomic_path, sha256_file
from drafthead.progress import wait_until
from drafthead.target.pieces import (
    TargetSpec,
    check_aux_layer_ids,
    load_target_spec,
    target_identity,
    target_names,
)
from drafthead.target.tokenizer import special_tokens

logger = logging.getLogger(__name__)
_HARVEST = "python data_gen/harvest.py RECIPE"
_RECORD = "started_from"
_IMPORT = "python export/import_head.py RECIPE name=OTHER --head"


@dataclass(frozen=True)
class Start:
    """Weights that a run begins with.

    Attributes:
        identity: what the run's own record says of them: `started_from`, and what is not the target's.
        file: float32 parameters with d2t and t2d.
        prompts: ids that they are known to be made from; None when nothing is known.
    """

    identity: dict[str, Any]
    file: Path
    prompts: set[str] | None = None

    def weights(self) -> dict[str, Tensor]:
        """float32 parameters with d2t and t2d.

        Raises:
            ArtifactError: the file is not the one that the run's record names.
        """
        if sha256_file(self.file) != self.identity[_RECORD]["weights"]:
            raise artifacts.ArtifactError(f"{self.file} is not what the run says it begins with: delete the run")
        return load_file(self.file)

    def shape(self, shape: DraftShape) -> DraftShape:
        """The recipe's shape with the head's own rotary embedding and norms."""
        return replace(shape, **{key: self.identity[key] for key in OWN if key in self.identity})


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run.

    Attributes:
        spec: the target's shape.
        train: states of the training split.
        validation: states of the validation split.
        identity: what the run is made from, for its manifest.
        start: weights that it begins with; None for a head made from its target.
    """

    spec: TargetSpec
    train: States
    validation: States
    identity: dict[str, Any]
    start: Start | None


def open_inputs(recipe: Recipe) -> Inputs:
    """Open both stores and check that they fit the recipe.

    Raises:
        ArtifactError: a store is missing, unfinished, or was harvested from another target or other aux layers; or
            `train.init_from` is no checkpoint.
        ValueError: an aux layer id lies beyond the target, or `train.init_from` holds another head.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    start = find_start(recipe, spec)
    references, stores = {}, {}
    for split in ("train", "validation"):
        directory = recipe.states_dir(split)
        opened = open_states(recipe, split)
        _check_store(opened.identity, recipe, spec, directory)
        references[split], stores[split] = opened.reference, opened.states
    identity = {
        "states": references,
        "target": target_identity(recipe, spec),
        "aux_layer_ids": list(recipe.target.aux_layer_ids),
        "head": recipe.head.model_dump(mode="json"),
        "train": recipe.train.model_dump(mode="json"),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        **(start.identity if start else {}),
    }
    return Inputs(spec, stores["train"], stores["validation"], identity, start)


def _check_store(identity: dict, recipe: Recipe, spec: TargetSpec, directory: Path) -> None:
    found_target, target = target_names(identity["target"], recipe, spec)
    wanted = {
        "target": target,
        "target.aux_layer_ids": list(recipe.target.aux_layer_ids),
        "states.format": recipe.states.format,
    }
    found = {
        "target": found_target,
        "target.aux_layer_ids": identity["aux_layer_ids"],
        "states.format": identity.get("format"),
    }
    if found != wanted:
        raise artifacts.ArtifactError(
            f"{directory} does not fit the recipe:\n{artifacts.describe_difference(found, wanted)}\n"
            f"harvest again under another name (name=...), or restore the recipe's target and states sections"
        )


@dataclass(frozen=True)
class Survey:
    """What one pass over the masks and tokens of the training split finds.

    Attributes:
        generated: (V,) how often the target generated each token.
        seen: (V,) how often each token occurs at all.
        by_category: category -> (V,) as `generated`, for the documents whose category is known.
        windows: what is trained on.
        silent: documents in which nothing can be learned from, such as answers of no token.
    """

    generated: Tensor
    seen: Tensor
    windows: list[Window]
    silent: int
    by_category: dict[str, Tensor]


def survey(
    store: States, vocab_size: int, budget: int, drafter: Drafter, categories: Mapping[str, str] | None = None
) -> Survey:
    """Count tokens and cut windows; states are not read. `categories` are by prompt id."""
    by_category: dict[str, Tensor] = {}
    generated, seen = torch.zeros(vocab_size, dtype=torch.long), torch.zeros(vocab_size, dtype=torch.long)
    windows: list[Window] = []
    silent = 0
    for i in range(len(store)):
        tokens, mask = store.tokens(i)
        generated_ids = tokens[mask]
        counted = [(seen, tokens), (generated, generated_ids)]
        if (category := (categories or {}).get(store.ids[i])) is not None:
            counted.append((by_category.setdefault(category, torch.zeros_like(generated)), generated_ids))
        for counts, ids in counted:  # in place: a histogram per document would cost more than everything else here
            counts.index_add_(0, ids, torch.ones_like(ids))
        found = cut(i, mask, budget, drafter)
        silent += not found
        windows += found
    return Survey(generated, seen, windows, silent, by_category)


def draft_vocabulary(recipe: Recipe, counts: Survey) -> DraftVocabulary:
    """The most frequent generated tokens, and every special token that the chat template can emit or the text holds.

    As many as head.draft_vocab_size says, or as head.coverage asks for.
    """
    special, emitted = special_tokens(recipe)
    # Multimodal tokenizers have ids past the rows of lm_head, which are read and never generated.
    usable = (i for i in special if i < len(counts.seen))
    required = torch.tensor(sorted(i for i in usable if i in emitted or counts.seen[i] > 0), dtype=torch.long)
    share = recipe.head.coverage
    size = recipe.head.draft_vocab_size if share is None else size_for_coverage(counts.generated, share, required)
    return choose_vocabulary(counts.generated, size, required)


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
        ArtifactError: states or responses are missing or unfinished, or the directory holds the other kind.
    """
    online = recipe.states.spool_shards is not None
    directory = recipe.states_dir(split)
    kind = spools.KIND if online and split == "train" else state_store.KIND
    if online:
        awaited = directory / (artifacts.IDENTITY if split == "train" else artifacts.MANIFEST)
        what = f"the harvester to write {awaited}; if it is not running: {_HARVEST}"
        wait_until(awaited.exists, what, quiet=os.environ.get("RANK", "0") != "0")
    _check_kind(recipe, split, kind)
    if kind == state_store.KIND:
        manifest = artifacts.require(directory, kind, _HARVEST)
        if stray := {path.name for path in directory.glob("shard-*.safetensors")} - manifest["files"].keys():
            raise artifacts.ArtifactError(
                f"{directory} holds {min(stray)}, which its {artifacts.MANIFEST} does not list: it belongs to another "
                "harvest; move it away"
            )
        return Opened(StateStore(directory), manifest["identity"], artifacts.reference(manifest))
    identity = artifacts.read_json(directory / artifacts.IDENTITY)
    made_from = artifacts.require(recipe.responses_dir(split), RESPONSES, "python data_gen/regenerate.py RECIPE")
    wanted = {**spools.terms(recipe), "responses": artifacts.reference(made_from)}
    found = {name: identity[name] for name in wanted}
    if found != wanted:
        raise artifacts.ArtifactError(
            f"{directory} does not fit the recipe:\n{artifacts.describe_difference(found, wanted)}\n"
            f"delete {directory}, or give the recipe another name (name=...)"
        )
    texts = ResponseTokens(recipe.responses_dir(split))
    spool = spools.open_spool(recipe, len(texts))
    return Opened(
        SpooledStates(spool, texts, recipe.states.sequences_per_shard, identity["aux_layer_ids"]), identity, identity
    )


def _check_kind(recipe: Recipe, split: str, wanted: str) -> None:
    directory = recipe.states_dir(split)
    if not (directory / artifacts.IDENTITY).exists():
        return  # its reader reports it
    found = artifacts.read_json(directory / artifacts.IDENTITY)["kind"]
    if {found, wanted} == {spools.KIND, state_store.KIND}:
        named = {spools.KIND: "a spool of online training", state_store.KIND: "a whole store of states"}
        raise artifacts.ArtifactError(
            f"{directory} is {named[found]}, but states.spool_shards {recipe.states.spool_shards} asks for "
            f"{named[wanted]}: restore the setting, delete {directory} and harvest again, or give the recipe another "
            "name (name=...)"
        )


def find_start(recipe: Recipe, spec: TargetSpec) -> Start | None:
    """What the recipe's run begins with; None when it is the target.

    A run that has begun reads its own copy. Otherwise the checkpoint is verified and compared with the recipe.

    Raises:
        ArtifactError: `train.init_from` is no verified checkpoint.
        ValueError: it holds another head than the recipe describes; the message has both values of every key.
    """
    if recipe.train.init_from is None:
        return None
    kept = _copy_of(recipe)
    if kept.exists():
        run = artifacts.read_json(recipe.run_dir / artifacts.IDENTITY)
        return Start({key: run[key] for key in (_RECORD, *OWN) if key in run}, kept)
    source = read_checkpoint(_located(recipe))
    _check_recipe(recipe, spec, source)
    return Start(_identity(recipe.train.init_from, source), source.file, _prompts_of(source))


def keep_start(recipe: Recipe, start: Start) -> Start:
    """Copy the weights into the run that has just been claimed; every rank calls this and rank 0 writes."""
    kept = _copy_of(recipe)
    if kept.exists():
        return replace(start, file=kept)
    if int(os.environ.get("RANK", "0")):
        wait_until(kept.exists, f"rank 0 to copy {start.file}", quiet=True)
        return replace(start, file=kept)
    if start.prompts is None:
        logger.info(
            "which prompts %s was trained on is not known: the exported head cannot say so", recipe.train.init_from
        )
    else:
        write_trained_on(recipe.run_dir, None, start.prompts)
    with atomic_path(kept) as temporary:
        shutil.copyfile(start.file, temporary)
    return replace(start, file=kept)


def _copy_of(recipe: Recipe) -> Path:
    return recipe.run_dir / "start" / MODEL_FILE


def _located(recipe: Recipe) -> Path:
    """The checkpoint's directory; a run's own directory means its best checkpoint."""
    given = str(recipe.train.init_from)
    path = recipe.directory(given)
    if not path.is_dir():
        raise FileNotFoundError(
            f"train.init_from {given} is no directory (looked at {path}): give runs/NAME or one of its checkpoints. "
            f"A head from the hub is imported first: {_IMPORT} {given}"
        )
    if (path / "config.json").exists():
        raise ValueError(
            f"train.init_from {given} is a head made for serving: import it first, {_IMPORT} {given}, "
            "and start from runs/OTHER"
        )
    if path.resolve() == recipe.run_dir.resolve() or recipe.run_dir.resolve() in path.resolve().parents:
        raise ValueError(
            f"train.init_from {given} is the recipe's own run: to resume it leave train.init_from out, "
            "to train on from its weights give the new run another name (name=...)"
        )
    return best_checkpoint(path) if (path / artifacts.IDENTITY).exists() else path


def _check_recipe(recipe: Recipe, spec: TargetSpec, source: Checkpoint) -> None:
    described, head = recipe.head.architecture(), source.head().architecture()
    size = source.draft_vocab_size()
    # A size by coverage comes from the head as well; what it covers of this run's text is printed.
    head["draft_vocab_size"] = size
    if described["coverage"] is None:
        head["coverage"] = None
    elif described["coverage"] == head["coverage"]:
        described["draft_vocab_size"] = size
    wanted = {f"head.{key}": value for key, value in described.items()}
    found = {f"head.{key}": value for key, value in head.items()}
    heads_target, target = target_names(source.run["target"], recipe, spec)
    wanted |= {"target.aux_layer_ids": list(recipe.target.aux_layer_ids), "target": target}
    found |= {"target.aux_layer_ids": list(source.aux_layer_ids), "target": heads_target}
    lines = [f"  {key}: recipe {wanted[key]!r}, head {found[key]!r}" for key in wanted if wanted[key] != found[key]]
    if lines:
        raise ValueError(
            f"train.init_from {recipe.train.init_from} holds another head than the recipe describes:\n"
            + "\n".join(lines)
            + "\nput the head's values into the recipe, or start from a head that fits it"
        )


def _identity(given: str, source: Checkpoint) -> dict[str, Any]:
    files = artifacts.read_json(source.path / artifacts.MANIFEST)["files"]
    record = {
        "path": given,
        "checkpoint": source.path.name,
        "step": source.state["step"],
        "weights": files[MODEL_FILE]["sha256"],
        "run": source.reference,
        **{key: source.run[key] for key in ("imported", _RECORD) if key in source.run},
    }
    return {_RECORD: record, **{key: source.run[key] for key in OWN if key in source.run}}


def _prompts_of(source: Checkpoint) -> set[str] | None:
    """Ids of the prompts behind a checkpoint, its own run's and those of what that one began with."""
    before = known_before(source.run_dir)
    if "imported" in source.run:
        return before
    prompts = source.run_dir.parents[1] / "data" / source.run_dir.name / "prompts"
    if not (prompts / artifacts.MANIFEST).exists() or (before is None and _RECORD in source.run):
        return None
    return (before or set()) | ids_of(prompts, ("train", "validation"))
