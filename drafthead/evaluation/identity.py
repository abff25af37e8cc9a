"""What a measurement is made from, and the refusal of heads that do not belong to it."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drafthead.config import Recipe
from drafthead.config.evaluation import HEADS, PARALLEL, MethodConfig
from drafthead.data.trained_on import read_trained_on
from drafthead.drafters.files import check_eagle3_files, check_tensor_files
from drafthead.evaluation.workload import BASELINE, HEAD, Workload, head_of, method_of
from drafthead.provenance import MANIFEST, ArtefactError, read_json, reference, require
from drafthead.target.files import fingerprint_of
from drafthead.target.pieces import load_target_spec, name_target

_MAKE_HEAD = "python export/head.py RECIPE"
# What a head for parallel drafting has beyond another (vLLM reads these keys and this tensor).
_MASK_TOKENS = {"mask_token_id", "pard_token", "ptd_token_id", "dflash_config", "dspark_noise_token_id"}
_MASK_STATE = "mask_hidden"


def identity(recipe: Recipe, workload: Workload, methods: Sequence[str]) -> dict[str, Any]:
    """Heads, prompts, target and the settings that change a measurement's meaning.

    Args:
        recipe: what is measured.
        workload: the prompts, rendered with the main reasoning effort.
        methods: names, the baseline's included.

    Raises:
        ArtefactError: a head is missing, half finished, or was made for another target.
        ValueError: a head was trained on prompts of the workload, a method needs a package that is not installed, or
            a head cannot draft in parallel.
    """
    target = fingerprint_of(recipe.target_path, recipe.target.revision)
    made_from: dict[str, Any] = {
        "target": recipe.target.path,
        "target_fingerprint": target,
        "dtype": recipe.target.dtype,
        "prompts": workload.digest,
        "engine": recipe.engine.model_dump(),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "max_tokens": recipe.eval.max_tokens,
        "reasoning_effort": recipe.eval.reasoning_effort,
    }
    if recipe.eval.synthetic_acceptance_length is not None:
        made_from["synthetic_acceptance_length"] = recipe.eval.synthetic_acceptance_length
    described = [_describe(recipe, workload, target, method_of(recipe, name)) for name in methods if name != BASELINE]
    if head := next((method["head"] for method in described if method["name"] == HEAD), None):
        made_from["head"] = head
    return made_from | {"arms": described}


def missing_package(method: str) -> str | None:
    """What to install before vLLM can draft with a method; None where nothing is missing."""
    if method == "suffix" and find_spec("arctic_inference") is None:
        return "vLLM needs `pip install arctic-inference==0.1.1` for suffix decoding"
    return None


def _describe(recipe: Recipe, workload: Workload, target: str, settings: MethodConfig) -> dict[str, Any]:
    if missing := missing_package(settings.method):
        raise ValueError(f"method {settings.name}: {missing}; or leave the method out of eval.methods")
    return {
        "name": settings.name,
        "method": settings.method,
        "head": _head_reference(recipe, workload, target, settings),
        "num_draft_tokens": list(recipe.eval.draft_tokens_of(settings)),
        "extra": settings.extra,
    }


def _head_reference(recipe: Recipe, workload: Workload, target: str, settings: MethodConfig) -> str | None:
    """Of a head made here its manifest's reference; of another a fingerprint of its files."""
    head = head_of(recipe, settings)
    if head is None:
        return None
    if settings.extra.get("parallel_drafting") and Path(head).is_dir():
        _check_parallel(settings, Path(head))
    if settings.head and not (Path(head) / MANIFEST).exists():
        _check_foreign(recipe, settings, head)
        return fingerprint_of(head)
    manifest = require(Path(head), "head", _MAKE_HEAD, every_byte=True)
    made_for = manifest["identity"]["target"]
    if made_for["fingerprint"] != target:
        served = {"path": recipe.target.path, "revision": recipe.target.revision, "fingerprint": target}
        raise ArtefactError(
            f"{head} was made for {name_target(made_for)}, but the recipe's target is {name_target(served)}: "
            "train and export a head for it"
        )
    _check_not_in_head(Path(head), workload, manifest)
    return reference(manifest)


def _check_foreign(recipe: Recipe, settings: MethodConfig, head: str) -> None:
    if Path(head).is_dir():
        if not (Path(head) / "config.json").is_file():
            raise FileNotFoundError(f"method {settings.name}: {head} has no config.json; {HEADS[settings.method]}")
        check_tensor_files(Path(head))
        if settings.method == HEAD:
            check_eagle3_files(Path(head), load_target_spec(recipe.target_path, recipe.target.revision))
    print(
        f"{head} (method {settings.name}) was not made here: whether it has seen the held-out prompts cannot be checked"
    )


def _check_parallel(settings: MethodConfig, head: Path) -> None:
    """What vLLM would say after the target is loaded."""
    config = read_json(head / "config.json") if (head / "config.json").is_file() else {}
    missing = [] if _MASK_TOKENS & set(config) else ["config.json names no mask token, such as ptd_token_id,"]
    # A draft_model (PARD) needs no more than the token.
    if settings.method != "draft_model" and not any(_holds(path, _MASK_STATE) for path in head.glob("*.safetensors")):
        missing.append(f"its weights hold no {_MASK_STATE}")
    if missing:
        raise ValueError(
            f"method {settings.name}: {head} cannot draft in parallel: {' and '.join(missing)}. {PARALLEL}; or leave "
            "parallel_drafting out of `extra`"
        )


def _holds(path: Path, name: str) -> bool:
    with safe_open(path, framework="pt") as file:
        return any(name in key for key in file.keys())  # noqa: SIM118 - no mapping


def _check_not_in_head(head: Path, workload: Workload, manifest: dict[str, Any]) -> None:
    """The recipe's own splits are apart already; a head of another recipe or an earlier mix may know these prompts."""
    trained_on = read_trained_on(head, manifest)
    if trained_on is None:
        print(f"{head} does not say which prompts it was trained on; only the recipe's splits were checked")
        return
    seen = trained_on & {prompt.id for prompt in workload.prompts}
    if seen:
        raise ValueError(
            f"{head} was trained on {len(seen)} of the {len(workload.prompts)} held-out prompts (such as "
            f"{min(seen)}): acceptance on them means nothing; evaluate it on prompts it has not seen, or train a head "
            "on the recipe's own training prompts"
        )
