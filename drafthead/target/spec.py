"""What a target's config.json says, as data: no weights, no tensors and no library that takes seconds to import."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from drafthead.config import Recipe
from drafthead.files import reading_external
from drafthead.target.families import complete
from drafthead.target.files import AGAIN, OTHER, fingerprint_of, local_files
from drafthead.target.rope import head_rope
from drafthead.target.tensors import check_output_layer, weight_map

_Count = Annotated[int, Field(gt=0, strict=True)]


class _Rotation(BaseModel):
    """What `head_rope` reads of a config.json."""

    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None


class TargetSpec(BaseModel, frozen=True):
    """What a target's config.json says about it.

    Attributes:
        name: path or hub id, as the recipe has it.
        hidden_size: H, hidden size.
        num_layers: L, number of layers; boundary ids run from 0 (embeddings) to L (input of the final norm).
        vocab_size: V, vocabulary size.
        rms_norm_eps: epsilon of the final norm.
        rope_parameters: rotation of a head for this target, in transformers' current form (rope_type, rope_theta, ...).
        max_position_embeddings: longest position the target was made for.
        tie_word_embeddings: whether lm_head is the embedding; None: config.json leaves it to the family.
        dtype: the checkpoint's dtype, by name.
        model_type: transformers' name of the architecture.
        revision: git revision of a hub id, as the recipe has it.
    """

    name: str
    revision: str | None
    hidden_size: _Count
    num_layers: _Count = Field(validation_alias="num_hidden_layers")
    vocab_size: _Count
    rms_norm_eps: Annotated[float, Field(gt=0, strict=True)]
    rope_parameters: dict[str, Any]
    max_position_embeddings: _Count
    tie_word_embeddings: bool | None
    dtype: Literal["bfloat16", "float16", "float32"]
    model_type: str

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of which target this is; the first use reads up to 256 KiB of every shard.

        Raises:
            FileNotFoundError: the weights are not here.
        """
        return fingerprint_of(self.name, self.revision)


def load_target_spec(path: str, revision: str | None = None) -> TargetSpec:
    """Read a target's shape, as data: no code runs, and config.json is all that is needed.

    Where weights are here, the names of their tensors are read too.

    Args:
        path: a directory, or a hub id whose files are cached or can be downloaded.
        revision: git revision of a hub id; None: the default branch.

    Raises:
        FileNotFoundError: there is no such directory, or it lacks a file (which is named).
        ValueError: config.json lacks a key, or the output layer is one that this project does not compute.
    """
    config = target_config(path, revision)
    directory = local_files(path, revision, ("config.json",))
    check_output_layer(path, config, weight_map(directory))  # weights of a hub id need not be here yet
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    tied = config.get("tie_word_embeddings")
    stated = {"name": path, "revision": revision, "dtype": dtype, "tie_word_embeddings": tied}
    try:
        _Rotation.model_validate(config)
        spec = TargetSpec.model_validate(config | stated | {"rope_parameters": {}})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(
            f"config.json of target {path} does not describe a decoder-only language model ({problems}), nor does its "
            f"family, model_type {config.get('model_type')}, say more. {OTHER}"
        ) from error
    return spec.model_copy(update={"rope_parameters": head_rope(config, path)})


def target_config(path: str, revision: str | None = None) -> dict[str, Any]:
    """The keys of a target's language model: those of config.json, completed with the defaults of its family.

    Raises:
        FileNotFoundError: config.json is missing.
        ForeignFileError: it is no JSON object.
    """
    file = local_files(path, revision, ("config.json",)) / "config.json"
    with reading_external(file, AGAIN):
        published: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return complete(published)


def recipe_spec(recipe: Recipe) -> TargetSpec:
    """The spec of a recipe's target, which has the recipe's aux layers.

    Raises:
        FileNotFoundError, ValueError: as `load_target_spec`.
        ValueError: an aux layer lies beyond the target.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    return spec


def model_config(recipe: Recipe) -> Any:
    """The target's config.json as transformers reads it.

    Raises:
        FileNotFoundError: it is not here.
        ForeignFileError: transformers refuses it.
    """
    from transformers import AutoConfig

    directory = local_files(recipe.target_path, recipe.target.revision, ("config.json",))
    with reading_external(directory / "config.json", AGAIN, unsupported=OTHER):
        return AutoConfig.from_pretrained(directory, trust_remote_code=recipe.target.trust_remote_code)


_TEMPLATE_KWARGS = "chat_template_kwargs"


def target_identity(recipe: Recipe, spec: TargetSpec) -> dict[str, Any]:
    """Which target an artifact was made from or for; consumers compare the fingerprint and the arguments of the chat
    template, which are left out where there are none."""
    target = {"path": recipe.target.path, "revision": recipe.target.revision, "fingerprint": spec.fingerprint}
    template_kwargs = recipe.target.chat_template_kwargs
    return target | ({_TEMPLATE_KWARGS: template_kwargs} if template_kwargs else {})


def target_names(recorded: Mapping[str, Any], recipe: Recipe, spec: TargetSpec) -> tuple[str, str]:
    """The target of an artifact and the recipe's as a person reads them: equal where the fingerprints are.

    Args:
        recorded: `target_identity` as the artifact recorded it.
        recipe: recipe as it is now.
        spec: shape of the recipe's target.
    """
    current = target_identity(recipe, spec)
    compared = ("fingerprint", _TEMPLATE_KWARGS)
    same = all(recorded.get(key) == current.get(key) for key in compared)  # a directory may have moved
    return _name_target(current if same else recorded), _name_target(current)


def _name_target(target: Mapping[str, Any]) -> str:
    """A target in words: what the recipe calls it, and the start of its fingerprint."""
    at = f" at revision {target['revision']}" if target["revision"] else ""
    template = f", {_TEMPLATE_KWARGS} {json.dumps(target[_TEMPLATE_KWARGS])}" if target.get(_TEMPLATE_KWARGS) else ""
    return f"{target['path']}{at} (fingerprint {target['fingerprint'][:12]}{template})"


def check_aux_layer_ids(spec: TargetSpec, aux_layer_ids: Sequence[int]) -> None:
    """Refuse boundaries that the target does not have.

    Raises:
        ValueError: an aux layer id is larger than L.
    """
    beyond = [layer_id for layer_id in aux_layer_ids if layer_id > spec.num_layers]
    if beyond:
        raise ValueError(
            f"target.aux_layer_ids {list(aux_layer_ids)}: {beyond} exceed the {spec.num_layers} layers of {spec.name}; "
            f"use ids from 0 (embeddings) to {spec.num_layers} (input of the final norm)"
        )


def captured_ids(spec: TargetSpec, aux_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The boundaries a harvest reads, ascending: the aux layers, and L once, which argmax and lse come from."""
    return tuple(sorted({*aux_layer_ids, spec.num_layers}))
