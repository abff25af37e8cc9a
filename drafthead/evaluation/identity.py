"""What a measurement is made from, and the refusal of heads that do not belong to it."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drafthead.config import Recipe
from drafthead.config.evaluation import HEADS, PARALLEL, ArmConfig
from drafthead.data.trained_on import read_trained_on
from drafthead.drafters.eagle3 import vllm
from drafthead.drafters.files import check_tensor_files
from drafthead.evaluation.workload import BASELINE, HEAD, Workload, arm_of, head_of
from drafthead.provenance import MANIFEST, ArtefactError, read_json, reference, require
from drafthead.target.files import fingerprint_of
from drafthead.target.pieces import load_target_spec, name_target

_MAKE_HEAD = "python export/head.py RECIPE"
# What a head for parallel drafting has beyond another (vLLM's llm_base_proposer.py and llama_eagle3.py).
_MASK_TOKENS = {"mask_token_id", "pard_token", "ptd_token_id", "dflash_config", "dspark_noise_token_id"}
_MASK_STATE = "mask_hidden"


def identity(recipe: Recipe, workload: Workload, arms: Sequence[str]) -> dict[str, Any]:
    """Heads, prompts, target and the settings that change a measurement's meaning.

    Args:
        recipe: what is measured.
        workload: the prompts, rendered with the main reasoning effort.
        arms: names, the baseline's included.

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
    described = [_describe(recipe, workload, target, arm_of(recipe, name)) for name in arms if name != BASELINE]
    if head := next((arm["head"] for arm in described if arm["name"] == HEAD), None):
        made_from["head"] = head
    return made_from | {"arms": described}


def missing_package(method: str) -> str | None:
    """What to install before vLLM can draft with a method; None where nothing is missing."""
    if method == "suffix" and find_spec("arctic_inference") is None:
        return "vLLM needs `pip install arctic-inference==0.1.1` for suffix decoding"
    return None


def _describe(recipe: Recipe, workload: Workload, target: str, arm: ArmConfig) -> dict[str, Any]:
    if missing := missing_package(arm.method):
        raise ValueError(f"arm {arm.name}: {missing}; or leave the arm out of eval.methods")
    return {
        "name": arm.name,
        "method": arm.method,
        "head": _head_reference(recipe, workload, target, arm),
        "num_draft_tokens": list(recipe.eval.draft_tokens_of(arm)),
        "extra": arm.extra,
    }


def _head_reference(recipe: Recipe, workload: Workload, target: str, arm: ArmConfig) -> str | None:
    """Of a head made here its manifest's reference; of another a fingerprint of its files."""
    head = head_of(recipe, arm)
    if head is None:
        return None
    if arm.extra.get("parallel_drafting") and Path(head).is_dir():
        _check_parallel(arm, Path(head))
    if arm.head and not (Path(head) / MANIFEST).exists():
        _check_foreign(recipe, arm, head)
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


def _check_foreign(recipe: Recipe, arm: ArmConfig, head: str) -> None:
    if Path(head).is_dir():
        if not (Path(head) / "config.json").is_file():
            raise FileNotFoundError(f"arm {arm.name}: {head} has no config.json; {HEADS[arm.method]}")
        check_tensor_files(Path(head))
        if arm.method == HEAD:
            vllm.check_files(Path(head), load_target_spec(recipe.target_path, recipe.target.revision))
    print(f"{head} (arm {arm.name}) was not made here: whether it has seen the held-out prompts cannot be checked")


def _check_parallel(arm: ArmConfig, head: Path) -> None:
    """What vLLM would say after the target is loaded."""
    config = read_json(head / "config.json") if (head / "config.json").is_file() else {}
    missing = [] if _MASK_TOKENS & set(config) else ["config.json names no mask token, such as ptd_token_id,"]
    # A draft_model (PARD) needs no more than the token.
    if arm.method != "draft_model" and not any(_holds(path, _MASK_STATE) for path in head.glob("*.safetensors")):
        missing.append(f"its weights hold no {_MASK_STATE}")
    if missing:
        raise ValueError(
            f"arm {arm.name}: {head} cannot draft in parallel: {' and '.join(missing)}. {PARALLEL}; or leave "
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
