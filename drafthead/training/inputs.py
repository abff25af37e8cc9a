"""What a run starts from: verified states, the draft vocabulary, and the weights it begins with.

Weights begin with the target's rows, or with another run's checkpoint (`train.init_from`). Of that, only weights are
taken over: draft vocabulary, rotary embedding and norms belong to them, while optimiser, schedule and order of the data
are the new run's own. The prompts behind them, where they are known, and its own are noted in
runs/NAME/training_prompts.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data import spool as spools
from drafthead.data import store as state_store
from drafthead.data.packing import Window, split_windows
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.responses import ResponseTokens, prompt_of
from drafthead.data.spool import SpooledStates, States
from drafthead.data.store import StateStore
from drafthead.drafters.base import Drafter
from drafthead.drafters.config import HeadConfig, ParallelHead
from drafthead.drafters.trained import MODEL_FILE, OWN, Checkpoint, best_checkpoint, read_checkpoint
from drafthead.drafters.vocabulary import DraftVocabulary, choose_vocabulary, size_for_coverage
from drafthead.progress import wait_until
from drafthead.target.spec import TargetSpec, recipe_spec, target_identity, target_names
from drafthead.target.tokenizer import special_tokens
from drafthead.training.rejection import stops_at_rejection

_HARVEST = "python data_gen/harvest.py RECIPE"
_RECORD = "started_from"
_IMPORT = "python export/import_head.py RECIPE name=OTHER --head"


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run.

    Attributes:
        spec: shape of the target.
        train: states of the training split.
        validation: states of the validation split.
        identity: inputs and settings of the run, for its manifest.
        start: checkpoint that training begins with; None for a head made from its target.
    """

    spec: TargetSpec
    train: States
    validation: States
    identity: dict[str, Any]
    start: Checkpoint | None

    @property
    def prompt_ids(self) -> set[str]:
        """Of the prompts that the run learns from, those that pick its checkpoint among them."""
        return {prompt_of(name) for states in (self.train, self.validation) for name in states.ids}


def open_inputs(recipe: Recipe) -> Inputs:
    """Open both splits' states, and check that they fit the recipe; online, wait for the harvester's first ones.

    Raises:
        ArtifactError: states are missing, unfinished, or were harvested from another target, from other aux layers or
            in another way than the recipe says; or `train.init_from` is no checkpoint.
        ValueError: an aux layer id lies beyond the target, or `train.init_from` holds another head.
    """
    spec = recipe_spec(recipe)
    start = find_start(recipe, spec)
    online = recipe.states.spool_shards is not None
    train, train_identity, train_reference = (_open_spool if online else _open_store)(recipe, "train")
    validation, validation_identity, validation_reference = _open_store(recipe, "validation")
    for split, store_identity in (("train", train_identity), ("validation", validation_identity)):
        stored_target, target = target_names(store_identity["target"], recipe, spec)
        expected = {
            "target": target, "aux_layer_ids": list(recipe.target.aux_layer_ids), "format": recipe.states.format,
            "dtype": recipe.target.dtype, "prompt_loss": recipe.states.prompt_loss,
        }  # fmt: skip
        stored = {**{name: store_identity[name] for name in expected}, "target": stored_target}
        _check_fits(recipe.states_dir(split), stored, expected)
    identity = {
        "states": {"train": train_reference, "validation": validation_reference},
        "target": target_identity(recipe, spec),
        "aux_layer_ids": list(recipe.target.aux_layer_ids),
        "head": recipe.head.model_dump(mode="json"),
        "train": recipe.train.model_copy(update={"rejection": stops_at_rejection(recipe)}).model_dump(mode="json"),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "max_tokens": recipe.eval.max_tokens,
        **(_start_identity(recipe, start) if start else {}),
    }
    return Inputs(spec, train, validation, identity, start)


@dataclass(frozen=True)
class Survey:
    """What one pass over the masks and tokens of the training split finds.

    Attributes:
        generated: (V,) how often the target generated each token.
        seen: (V,) how often each token occurs at all.
        by_category: category -> (V,) as `generated`, for the documents whose category is known.
        windows: windows that are trained on, of every draw.
        num_without_loss: number of documents without a token that carries loss, such as empty responses.
    """

    generated: Tensor
    seen: Tensor
    windows: list[Window]
    num_without_loss: int
    by_category: dict[str, Tensor]

    def check_mask_token(self, head: HeadConfig) -> None:
        """Refuse a mask token that stands in the text.

        Raises:
            ValueError: naming the token and how often it occurs.
        """
        if isinstance(head, ParallelHead) and (times := int(self.seen[head.mask_token_id])):
            raise ValueError(
                f"head.mask_token_id {head.mask_token_id} occurs {times:,} times in the training text; choose a token "
                "that the tokenizer reserves"
            )


def survey(
    store: States,
    vocab_size: int,
    budget: int,
    drafter: Drafter,
    categories: Mapping[str, str] | None = None,
    draws: int = 1,
) -> Survey:
    """Count tokens and cut windows, for each of so many draws; states are not read.
    `categories` are by prompt id."""
    by_category: dict[str, Tensor] = {}
    generated, seen = torch.zeros(vocab_size, dtype=torch.long), torch.zeros(vocab_size, dtype=torch.long)
    windows: list[Window] = []
    num_without_loss = 0
    for i in range(len(store)):
        tokens, mask = store.tokens(i)
        if int(tokens.max()) >= vocab_size:
            raise artifacts.ArtifactError(
                f"sequence {store.ids[i]} holds token {int(tokens.max())}, but the target has {vocab_size}: its "
                "tokenizer is another model's; give the target its own, and generate the responses again"
            )
        generated_ids = tokens[mask == 1]
        counted = [(seen, tokens), (generated, generated_ids)]
        if (category := (categories or {}).get(store.ids[i])) is not None:
            counted.append((by_category.setdefault(category, torch.zeros_like(generated)), generated_ids))
        for counts, ids in counted:  # in place: a histogram per document would cost more than everything else here
            counts.index_add_(0, ids, torch.ones_like(ids))
        document_windows = [window for draw in range(draws) for window in split_windows(i, mask, budget, drafter, draw)]
        num_without_loss += not document_windows
        windows += document_windows
    return Survey(generated, seen, windows, num_without_loss, by_category)


def draft_vocabulary(recipe: Recipe, counts: Survey, start: Tensor | None = None) -> DraftVocabulary:
    """The most frequent generated tokens, and every special token that the chat template can emit or the text holds.

    As many as head.draft_vocab_size says, or as head.coverage asks for; with `start`, the t2d (V,) of the head that
    weights come from, as many as that one has, whose tokens come first among the equally frequent.
    """
    special, emitted = special_tokens(recipe)
    # Multimodal tokenizers have ids past the rows of lm_head, which are read and never generated.
    usable = (i for i in special if i < len(counts.seen))
    required = torch.tensor(sorted(i for i in usable if i in emitted or counts.seen[i] > 0), dtype=torch.long)
    if start is not None:
        return choose_vocabulary(2 * counts.generated + start, int(start.sum()), required)
    share = recipe.head.coverage
    size = recipe.head.draft_vocab_size if share is None else size_for_coverage(counts.generated, share, required)
    return choose_vocabulary(counts.generated, size, required)


def _open_store(recipe: Recipe, split: str) -> tuple[States, dict[str, Any], str]:
    """A split's states, what they are made from, and the reference to them that a run writes into its own identity."""
    directory = recipe.states_dir(split)
    if recipe.states.spool_shards is not None:
        _wait_for_harvester(directory / artifacts.MANIFEST)
    manifest = artifacts.require(directory, state_store.KIND, _HARVEST)
    if stray := {path.name for path in directory.glob("shard-*.safetensors")} - manifest["files"].keys():
        raise artifacts.ArtifactError(
            f"{directory} holds {min(stray)}, which its {artifacts.MANIFEST} does not list: it belongs to another "
            "harvest; move it away"
        )
    return StateStore(directory), manifest["identity"], artifacts.reference(manifest)


def _open_spool(recipe: Recipe, split: str) -> tuple[States, dict[str, Any], dict[str, Any]]:
    """As `_open_store`, online; the reference is the spool's identity, as its shards come and go."""
    directory, responses_dir = recipe.states_dir(split), recipe.responses_dir(split)
    _wait_for_harvester(directory / artifacts.IDENTITY)
    identity = artifacts.read_json(directory / artifacts.IDENTITY)
    responses = artifacts.require(responses_dir, RESPONSES, "python data_gen/regenerate.py RECIPE")
    expected = {"kind": spools.KIND, **spools.terms(recipe), "responses": artifacts.reference(responses)}
    _check_fits(directory, {name: identity.get(name) for name in expected}, expected)
    texts = ResponseTokens(responses_dir, recipe.states.learned_share(split))
    spool, size = spools.open_spool(recipe, len(texts.ids)), recipe.states.sequences_per_shard
    return SpooledStates(spool, texts, size, identity["aux_layer_ids"]), identity, identity


def _wait_for_harvester(path: Path) -> None:
    wait_until(path.exists, f"the harvester to write {path}; if it is not running: {_HARVEST}")


def _check_fits(directory: Path, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    if stored != expected:
        raise artifacts.ArtifactError(
            f"{directory} does not fit the recipe:\n{artifacts.describe_difference(stored, expected)}\n"
            "harvest under another name (name=...), or restore the recipe's target and states sections"
        )


def find_start(recipe: Recipe, spec: TargetSpec) -> Checkpoint | None:
    """The verified checkpoint whose weights the recipe's run begins with; None when it begins with its target's.

    Raises:
        ArtifactError: `train.init_from` is no verified checkpoint.
        ValueError: it holds another head than the recipe describes; the message has both values of every key.
    """
    init_from = recipe.train.init_from
    if init_from is None:
        return None
    path = recipe.directory(init_from)
    if not path.is_dir() or (path / "config.json").exists():
        what = path if path.is_dir() else init_from
        raise ValueError(
            f"train.init_from {init_from} is no run or checkpoint (looked at {path}): give runs/NAME or one of its "
            f"checkpoints. A head, from the hub or below heads/, is imported first: {_IMPORT} {what}"
        )
    source = read_checkpoint(best_checkpoint(path) if (path / artifacts.IDENTITY).exists() else path)
    head = recipe.head.model_copy(update={"sliding_window": source.head().sliding_window})  # weights fit any window
    if differences := source.differences(recipe.model_copy(update={"head": head}), spec):
        raise ValueError(
            f"train.init_from {init_from} holds another head than the recipe describes:\n{differences}\n"
            "put the head's values into the recipe, or start from a head that fits it"
        )
    return source


def _start_identity(recipe: Recipe, source: Checkpoint) -> dict[str, Any]:
    """What a run's record says of the weights it began with."""
    files = artifacts.read_json(source.path / artifacts.MANIFEST)["files"]
    record = {
        "path": recipe.train.init_from,
        "checkpoint": source.path.name,
        "step": source.state["step"],
        "weights": files[MODEL_FILE]["sha256"],
        **{key: source.run[key] for key in ("imported", _RECORD) if key in source.run},
    }
    return {_RECORD: record, **{key: source.run[key] for key in OWN if key in source.run}}
