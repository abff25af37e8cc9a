"""What is measured: held-out prompts as token ids, and the methods that answer them.

Every arm reads the same token ids, rendered once by the target's own chat template, offline and through a
server alike. What this gives up is the server's own rendering of chats; see drafthead/serving/load.py.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer

from drafthead.config import Recipe
from drafthead.data.prompts import KIND, Prompt, read_prompts
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.data.trained_on import read_trained_on
from drafthead.models.target_files import fingerprint_of
from drafthead.provenance import ArtefactError, reference, require

BASELINE, BASELINE_AGAIN = "none", "none-again"
NAMES = {
    BASELINE: "no speculation",
    BASELINE_AGAIN: "baseline again (noise floor)",
    "eagle3": "EAGLE-3 head",
    "ngram": "n-gram",
}
_MAKE_PROMPTS = "python data_gen/prompts.py RECIPE"
_MAKE_HEAD = "python export/head.py RECIPE"
_NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


@dataclass(frozen=True)
class EvalPrompt:
    """A held-out prompt as the engine reads it."""

    id: str
    category: str
    prompt_ids: list[int]


@dataclass(frozen=True)
class Workload:
    """The held-out prompts of a recipe.

    Attributes:
        prompts: those that fit.
        too_long: how many were left out because prompt, answer and drafts exceed engine.max_model_len.
        unrenderable: reason -> how many were left out because they have no token ids for this target.
    """

    prompts: list[EvalPrompt]
    too_long: int
    unrenderable: dict[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Changes with any token of any prompt: what the tokenizer and the template made of the text."""
        text = ";".join(f"{p.id}:{','.join(map(str, p.prompt_ids))}" for p in self.prompts)
        return hashlib.sha256(text.encode()).hexdigest()


def load_workload(recipe: Recipe) -> Workload:
    """Read and render the held-out prompts, after checking that nothing was trained on them.

    Raises:
        ArtefactError: the prompts artefact is missing or half finished.
        ValueError: a held-out prompt is also a training or validation prompt, or none fits the engine.
    """
    require(recipe.prompts_dir, KIND, _MAKE_PROMPTS)
    heldout = read_prompts(recipe.prompts_dir, "heldout")
    _check_not_trained_on(recipe, heldout)
    tokenizer = AutoTokenizer.from_pretrained(
        recipe.target_path, revision=recipe.target.revision, trust_remote_code=recipe.target.trust_remote_code
    )
    rendered, unrenderable = _render(renderer(tokenizer), heldout, recipe.eval.reasoning_effort)
    for reason, count in unrenderable.items():
        print(f"{count} of {len(heldout)} held-out prompts are left out: {reason}")
    # vLLM stops drafting for a whole batch once one request has no room left for the drafts.
    room = recipe.engine.max_model_len - recipe.eval.max_tokens - recipe.eval.num_draft_tokens - 1
    fitting = [p for p in rendered if len(p.prompt_ids) <= room]
    if not fitting:
        shortest = min((len(p.prompt_ids) for p in rendered), default=0)
        raise ValueError(
            f"none of the {len(rendered)} held-out prompts fits: the shortest has {shortest} tokens, "
            f"engine.max_model_len {recipe.engine.max_model_len} leaves {room}; raise it or lower eval.max_tokens"
        )
    return Workload(fitting, len(rendered) - len(fitting), unrenderable)


def _render(
    render: Callable[[Prompt, str], list[int]], prompts: list[Prompt], effort: str
) -> tuple[list[EvalPrompt], dict[str, int]]:
    rendered, left_out = [], Counter[str]()
    for prompt in prompts:
        try:
            rendered.append(EvalPrompt(prompt.id, prompt.category, render(prompt, effort)))
        except UnrenderableError as error:
            left_out[error.reason] += 1
    return rendered, dict(left_out)


def _check_not_trained_on(recipe: Recipe, heldout: list[Prompt]) -> None:
    for split in ("train", "validation"):
        seen = {p.id for p in read_prompts(recipe.prompts_dir, split)} & {p.id for p in heldout}
        if seen:
            raise ValueError(
                f"{len(seen)} held-out prompts are also {split} prompts (such as {min(seen)}): acceptance on text "
                f"the head was trained on means nothing; delete {recipe.prompts_dir} and run: {_MAKE_PROMPTS}"
            )


def speculative_config(recipe: Recipe, method: str) -> dict[str, Any] | None:
    """vLLM's speculative_config of a method, at the recipe's eval.num_draft_tokens."""
    if method == BASELINE:
        return None
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": recipe.eval.num_draft_tokens}
    if method == "eagle3":
        return {"method": method, "model": str(recipe.head_dir), **config, **_synthetic(recipe)}
    return config | _NGRAM


def _synthetic(recipe: Recipe) -> dict[str, Any]:
    length = recipe.eval.synthetic_acceptance_length
    return {} if length is None else {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


def identity(recipe: Recipe, workload: Workload, arms: tuple[str, ...]) -> dict[str, Any]:
    """What a measurement is made from: head, prompts, target and the settings that change its meaning.

    Raises:
        ArtefactError: the head is missing, half finished, or was made for another target.
        ValueError: the head was trained on prompts of the workload.
    """
    target = fingerprint_of(recipe.target_path, recipe.target.revision)
    made_from: dict[str, Any] = {
        "target": recipe.target.path,
        "target_fingerprint": target,
        "dtype": recipe.target.dtype,
        "prompts": workload.digest,
        "engine": recipe.engine.model_dump(),
        "arms": list(arms),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "max_tokens": recipe.eval.max_tokens,
        "reasoning_effort": recipe.eval.reasoning_effort,
    }
    if recipe.eval.synthetic_acceptance_length is not None:
        made_from["synthetic_acceptance_length"] = recipe.eval.synthetic_acceptance_length
    if "eagle3" in arms:
        manifest = require(recipe.head_dir, "head", _MAKE_HEAD)
        made_for = manifest["identity"]["target"]["fingerprint"]
        if made_for != target:
            raise ArtefactError(
                f"{recipe.head_dir} was made for target {made_for[:12]}, but target.path {recipe.target.path} is "
                f"{target[:12]}; train and export a head for it"
            )
        _check_not_in_head(recipe, workload, manifest)
        made_from["head"] = reference(manifest)
    return made_from


def _check_not_in_head(recipe: Recipe, workload: Workload, manifest: dict[str, Any]) -> None:
    """The recipe's own splits are apart already; a head of another recipe or an earlier mix may know these prompts."""
    trained_on = read_trained_on(recipe.head_dir, manifest)
    if trained_on is None:
        print(f"{recipe.head_dir} does not say which prompts it was trained on; only the recipe's splits were checked")
        return
    seen = trained_on & {prompt.id for prompt in workload.prompts}
    if seen:
        raise ValueError(
            f"{recipe.head_dir} was trained on {len(seen)} of the {len(workload.prompts)} held-out prompts (such as "
            f"{min(seen)}): acceptance on them means nothing; evaluate it on prompts it has not seen, or train a head "
            "on the recipe's own training prompts"
        )
