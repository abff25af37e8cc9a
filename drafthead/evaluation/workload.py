"""What is measured: held-out prompts as token ids, and the methods that answer them.

Every method reads the same token ids, rendered once by the target's own chat template, offline and through a
server alike. What this gives up is the server's own rendering of chats; see drafthead/engine/load.py.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drafthead.artifacts import MANIFEST, ArtifactError, reference, require
from drafthead.config.evaluation import HEAD, HEADS, SAMPLED, Method, MethodConfig
from drafthead.config.recipe import Recipe, local_or_hub
from drafthead.data.prompts import KIND, Prompt, prompt_id, read_prompts, read_trained_on, split_turns
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.vllm import check_files, check_tensor_files
from drafthead.engine.offline import on_cpu
from drafthead.target.files import fingerprint_of
from drafthead.target.spec import load_target_spec, recipe_spec, target_names
from drafthead.target.tokenizer import load_tokenizer

_LOG = logging.getLogger(__name__)
BASELINE = "none"
_LABELS = {
    BASELINE: "no speculation", "mtp": "the target's MTP layers",
    "ngram": "n-gram", "ngram_gpu": "n-gram on the GPU", "suffix": "suffix decoding",
}  # fmt: skip
_LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
_DEFAULTS: dict[Method, dict[str, Any]] = {"ngram": _LOOKUP, "ngram_gpu": _LOOKUP, "suffix": {}, "mtp": {}}


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


def load_workload(
    recipe: Recipe,
    effort: str | None = None,
    max_tokens: int = 0,
    draft_tokens: int = 0,
    first_question: bool = False,
) -> Workload:
    """Read and render the held-out prompts.

    Args:
        recipe: its prompts, target and eval sections are used.
        effort: reasoning effort told to the chat template; None: the recipe's main one.
        max_tokens, draft_tokens: longest response and drafts, where they are longer than the recipe's.
        first_question: of every conversation its first question alone, once.

    Raises:
        ArtifactError: the prompts artifact is missing or half finished.
        ValueError: none fits the engine.
    """
    require(recipe.prompts_dir, KIND, "python data_gen/prompts.py RECIPE", every_byte=True)
    heldout = read_prompts(recipe.prompts_dir, "heldout")
    if first_question:
        heldout = list({(p.source, p.id): p for p in map(_first_question, heldout)}.values())
    render = renderer(recipe, load_tokenizer(recipe))
    rendered, unrenderable = [], Counter[str]()
    for p in heldout:
        try:
            ids = render(p, effort or recipe.eval.reasoning_effort)
            rendered.append(EvalPrompt(p.id, p.category, ids, p.source))
        except UnrenderableError as error:
            unrenderable[error.reason] += 1
    for reason, count in unrenderable.items():
        _LOG.info(f"{count} of {len(heldout)} held-out prompts are left out: {reason}")
    room = prompt_room(recipe, max(max_tokens, recipe.eval.max_tokens), draft_tokens)
    fitting = [p for p in rendered if len(p.prompt_ids) <= room]
    if not fitting:
        shortest = min((len(p.prompt_ids) for p in rendered), default=0)
        raise ValueError(
            f"none of the {len(rendered)} held-out prompts fits: the shortest has {shortest} tokens, "
            f"engine.max_model_len {recipe.engine.max_model_len} leaves {room}; raise it or lower eval.max_tokens"
        )
    return Workload(fitting, len(rendered) - len(fitting), dict(unrenderable))


def _first_question(prompt: Prompt) -> Prompt:
    if not prompt.messages:
        return prompt
    messages = split_turns(prompt.messages, "first")[0][0]
    return replace(prompt, messages=messages, id=prompt_id(messages, tools=prompt.tools))


def where_to_add_prompts(recipe: Recipe) -> str:
    """Where a source is added: what was made of the prompts that are there, the head included, stays."""
    if not (recipe.prompts_dir / MANIFEST).exists():
        return "prompts.sources"
    return (
        f"prompts.sources under data={recipe.data or recipe.name}-eval, with which data_gen/prompts.py makes prompts "
        "beside those that are there, and this command measures the same head on them"
    )


def prompt_room(recipe: Recipe, max_tokens: int, draft_tokens: int = 0) -> int:
    """Tokens that a prompt may have before a response of at most `max_tokens`, at the recipe's Ks or a longer one."""
    # vLLM stops drafting for a whole batch once one request has no room left for the drafts.
    listed = dict.fromkeys([*(method.name for method in recipe.eval.methods), *recipe.eval.served])
    methods = (method_of(recipe, name) for name in methods_at(recipe, [*listed], max(recipe.eval.temperatures)))
    longest = max(draft_tokens, *(k for method in methods for k in recipe.eval.draft_tokens_of(method)))
    return recipe.engine.max_model_len - max_tokens - longest - 1


def method_of(recipe: Recipe, name: str, added: Sequence[MethodConfig] = ()) -> MethodConfig:
    """The method of that name; those that need no `head` (the recipe\'s head among them) exist without being listed.

    Args:
        recipe: its eval section has the methods.
        name: of the method.
        added: methods of an experiment beside the recipe's (`ServePlan.added`).

    Raises:
        ValueError: there is no such method.
    """
    found: dict[str, MethodConfig] = {method: MethodConfig(name=method, method=method) for method in (HEAD, *_DEFAULTS)}
    found[SAMPLED] = MethodConfig(name=SAMPLED, method=HEAD, extra={"draft_sample_method": "probabilistic"})
    found |= {settings.name: settings for settings in (*recipe.eval.methods, *added)}
    if name not in found:
        raise ValueError(f"no method {name} in eval.methods; there are {', '.join(found)}")
    return found[name]


@dataclass(frozen=True)
class MethodNames:
    """What tables and plots call a method: the recipe's head goes by its drafter, an entry of eval.methods by its name.

    Attributes:
        drafter: name of the drafter of the recipe's head, such as DFlash.
    """

    drafter: str

    def __getitem__(self, method: str) -> str:
        heads = {HEAD: f"{self.drafter} head", SAMPLED: f"{self.drafter} head, drafts sampled"}
        return (_LABELS | heads).get(method, method)

    def at(self, method: str, K: int) -> str:
        """The method with its draft length."""
        return f"{self[method]}, K = {K}" if K else self[method]


def method_names(recipe: Recipe) -> MethodNames:
    """What this recipe's methods are called."""
    return MethodNames(drafter_of(recipe.head).vllm.ALGORITHM)


def methods_at(recipe: Recipe, listed: Sequence[str], temperature: float) -> tuple[str, ...]:
    """The methods to measure at a temperature, of those that the recipe lists."""
    return (*listed, SAMPLED) if temperature > 0 and HEAD in listed and SAMPLED not in listed else tuple(listed)


def head_of(recipe: Recipe, settings: MethodConfig) -> str | None:
    """The draft's directory or hub id; None for methods that draft without a model."""
    if settings.head:
        return local_or_hub(f"head of method {settings.name}", settings.head)
    return str(recipe.head_dir) if settings.method == HEAD else None


def speculative_config(
    recipe: Recipe, method: str, k: int | None = None, added: Sequence[MethodConfig] = ()
) -> dict[str, Any] | None:
    """vLLM's speculative_config of a method by name, at K draft tokens; None for the baseline.

    Args:
        recipe: its eval section has the methods.
        method: name of a method.
        k: draft tokens; None: the method's main K.
        added: as in `method_of`.
    """
    if method == BASELINE:
        return None
    settings = method_of(recipe, method, added)
    head = head_of(recipe, settings)
    K = k or recipe.eval.draft_tokens_of(settings)[0]
    if settings.method != HEAD:
        drafting = {"model": head} if head else _DEFAULTS[settings.method]
        return {"method": settings.method, **drafting, "num_speculative_tokens": K, **settings.extra}
    assert head is not None
    return drafter_of(recipe.head).vllm.speculative_config(head, K) | settings.extra


# What a measurement is made from, and the refusal of heads that do not belong to it.


# Of vLLM's speculative_config: the CPU build does not start with these, or leaves them out without a word (block).
_GPU = {"method": ("ngram_gpu", "dspark"), "rejection_sample_method": ("block",), "enable_adaptive_verification": (1,)}


def identity(
    recipe: Recipe, workload: Workload, methods: Sequence[str], added: Sequence[MethodConfig] = ()
) -> dict[str, Any]:
    """Heads, prompts, target and the settings that change a measurement's meaning.

    Args:
        recipe: what is measured.
        workload: the prompts, rendered with the main reasoning effort.
        methods: names, the baseline's included.
        added: as in `method_of`.

    Raises:
        ArtifactError: a head is missing, half finished, or was made for another target.
        ValueError: a head was trained on prompts of the workload, or a method needs a package that is not installed.
    """
    made_from: dict[str, Any] = {
        "target": recipe.target.path,
        "target_fingerprint": fingerprint_of(recipe.target_path, recipe.target.revision),
        "dtype": recipe.target.dtype,
        "prompts": workload.digest,
        "engine": recipe.engine.model_dump(),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "max_tokens": recipe.eval.max_tokens,
        "reasoning_effort": recipe.eval.reasoning_effort,
    }
    if template_kwargs := recipe.target.chat_template_kwargs:
        made_from["chat_template_kwargs"] = template_kwargs
    described = []
    for settings in (method_of(recipe, name, added) for name in methods if name != BASELINE):
        if missing := missing_requirement(recipe, settings):
            raise ValueError(f"method {settings.name}: {missing}; or leave the method out of eval.methods")
        head = _head_reference(recipe, workload, settings)
        if head and settings.name == HEAD:
            made_from["head"] = head
        own = settings.model_dump(include={"name", "method", "extra"})
        described.append(own | {"head": head, "num_draft_tokens": list(recipe.eval.draft_tokens_of(settings))})
    return made_from | {"methods": described}


def missing_requirement(recipe: Recipe, method: MethodConfig) -> str | None:
    """What keeps this machine from drafting with a method, and what to do; None where nothing does."""
    config = speculative_config(recipe, method.name, added=(method,)) or {}
    if config["method"] == "suffix" and find_spec("arctic_inference") is None:
        return "vLLM needs `pip install arctic-inference==0.1.1` for suffix decoding"
    needs = [f"{key} {config[key]}" for key, values in _GPU.items() if config.get(key) in values]
    if needs and on_cpu():
        return f"vLLM's CPU build has no {needs[0]}; measure it on a GPU machine"
    return None


def _head_reference(recipe: Recipe, workload: Workload, settings: MethodConfig) -> str | None:
    """Of a head made here its manifest's reference; of another a fingerprint of its files."""
    head = head_of(recipe, settings)
    if head is None:
        return None
    if settings.head and not (Path(head) / MANIFEST).exists():
        _check_foreign(recipe, settings, head)
        return fingerprint_of(head, None, sorted(path.name for path in Path(head).glob("*.safetensors")))
    manifest = require(Path(head), "head", "python export/head.py RECIPE", every_byte=True)
    made_for, served = target_names(manifest["identity"]["target"], recipe, recipe_spec(recipe))
    if made_for != served:
        raise ArtifactError(
            f"{head} was made for {made_for}, but the recipe's target is {served}: train and export a head for it"
        )
    _check_not_in_head(Path(head), workload, manifest)
    return reference(manifest)


def _check_foreign(recipe: Recipe, settings: MethodConfig, head: str) -> None:
    if Path(head).is_dir():
        if not (Path(head) / "config.json").is_file():
            raise FileNotFoundError(f"method {settings.name}: {head} has no config.json; {HEADS[settings.method]}")
        try:
            check_tensor_files(Path(head))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"method {settings.name}: {error}") from None
        if settings.method in (HEAD, "eagle3"):
            check_files(Path(head), load_target_spec(recipe.target_path, recipe.target.revision))
    _LOG.info(
        f"{head} (method {settings.name}) was not made here: whether it has seen the held-out prompts cannot be checked"
    )


def _check_not_in_head(head: Path, workload: Workload, manifest: dict[str, Any]) -> None:
    """The recipe's own splits are apart already; a head of another recipe or an earlier mix may know these prompts."""
    trained_on = read_trained_on(head, manifest)
    if trained_on is None:
        _LOG.info(f"{head} does not say which prompts it was trained on; only the recipe's splits were checked")
        return
    seen = trained_on & {prompt.id for prompt in workload.prompts}
    if seen:
        raise ValueError(
            f"{head} was trained on {len(seen)} of the {len(workload.prompts)} held-out prompts (such as "
            f"{min(seen)}): acceptance on them means nothing; evaluate it on prompts it has not seen, or train a head "
            "on the recipe's own training prompts"
        )
