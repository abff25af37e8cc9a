"""What is measured: held-out prompts as token ids, and the methods that answer them.

Every method reads the same token ids, rendered once by the target's own chat template, offline and through a
server alike. What this gives up is the server's own rendering of chats; see drafthead/engine/load.py.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drafthead.config import Recipe, local_or_hub
from drafthead.config.evaluation import LABELS, OWN, Method, MethodConfig
from drafthead.data.prompts import KIND, Prompt, read_prompts
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.provenance import require
from drafthead.target.tokenizer import load_tokenizer

BASELINE, BASELINE_AGAIN = "none", "none-again"
HEAD: Method = OWN  # the recipe's own head


class _Names(dict[str, str]):
    """Methods that the recipe named itself are called what it calls them."""

    def __missing__(self, method: str) -> str:
        return method


NAMES = _Names(
    {
        BASELINE: "no speculation",
        BASELINE_AGAIN: "baseline again (noise floor)",
        **LABELS,
    }
)
_MAKE_PROMPTS = "python data_gen/prompts.py RECIPE"
_DEFAULTS: dict[Method, dict[str, Any]] = {"ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2}, "suffix": {}}


@dataclass(frozen=True)
class EvalPrompt:
    """A held-out prompt as the engine reads it."""

    id: str
    category: str
    prompt_ids: list[int]
    source: str = ""


@dataclass(frozen=True)
class Workload:
    """The held-out prompts of a recipe.

    Attributes:
        prompts: those that fit.
        too_long: how many were left out because prompt, response and drafts exceed engine.max_model_len.
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


def load_workload(recipe: Recipe, effort: str | None = None) -> Workload:
    """Read and render the held-out prompts, after checking that nothing was trained on them.

    Args:
        recipe: its prompts, target and eval sections are used.
        effort: reasoning effort told to the chat template; None: the recipe's main one.

    Raises:
        ArtefactError: the prompts artefact is missing or half finished.
        ValueError: a held-out prompt is also a training or validation prompt, or none fits the engine.
    """
    require(recipe.prompts_dir, KIND, _MAKE_PROMPTS, every_byte=True)
    heldout = read_prompts(recipe.prompts_dir, "heldout")
    _check_not_trained_on(recipe, heldout)
    tokenizer = load_tokenizer(recipe)
    rendered, unrenderable = _render(renderer(recipe, tokenizer), heldout, effort or recipe.eval.reasoning_effort)
    for reason, count in unrenderable.items():
        print(f"{count} of {len(heldout)} held-out prompts are left out: {reason}")
    # vLLM stops drafting for a whole batch once one request has no room left for the drafts.
    longest = max(k for method in recipe.eval.methods for k in recipe.eval.draft_tokens_of(method))
    room = recipe.engine.max_model_len - recipe.eval.max_tokens - longest - 1
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
            rendered.append(EvalPrompt(prompt.id, prompt.category, render(prompt, effort), prompt.source))
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


def method_of(recipe: Recipe, name: str) -> MethodConfig:
    """The method of that name; those that need no `head` (the recipe's own head among them) exist without being listed.

    Raises:
        ValueError: the recipe has no such method.
    """
    found: dict[str, MethodConfig] = {method: MethodConfig(name=method, method=method) for method in (HEAD, *_DEFAULTS)}
    found |= {settings.name: settings for settings in recipe.eval.methods}
    if name not in found:
        raise ValueError(f"no method {name} in eval.methods; there are {', '.join(found)}")
    return found[name]


def head_of(recipe: Recipe, settings: MethodConfig) -> str | None:
    """The draft's directory or hub id; None for methods that draft without a model."""
    if settings.head:
        return local_or_hub(f"head of method {settings.name}", settings.head)
    return str(recipe.head_dir) if settings.method == OWN else None


def speculative_config(recipe: Recipe, method: str, k: int | None = None) -> dict[str, Any] | None:
    """vLLM's speculative_config of a method by name, at K draft tokens; None for the baseline.

    Args:
        recipe: its eval section has the methods.
        method: name of a method.
        k: draft tokens; None: the method's main K.
    """
    if method == BASELINE:
        return None
    settings = method_of(recipe, method)
    head = head_of(recipe, settings)
    drafting = {"model": head} if head else _DEFAULTS[settings.method]
    tokens = {"num_speculative_tokens": k or recipe.eval.draft_tokens_of(settings)[0]}
    assumed = _synthetic(recipe) if method == HEAD else {}
    return {"method": settings.method, **drafting, **tokens, **assumed, **settings.extra}


def _synthetic(recipe: Recipe) -> dict[str, Any]:
    length = recipe.eval.synthetic_acceptance_length
    return {} if length is None else {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
