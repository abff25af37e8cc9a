"""The recipe: everything about one head, in one typed and strict YAML file.

A recipe has one section per stage. An unknown key, a wrong type or an impossible combination is an
error before any work starts. Values can be overridden on the command line with dotted keys
(`train.learning_rate=1e-3`). What this gives up is free-form configuration: a knob exists only when
it is declared and documented here.
"""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, model_validator
from yaml import YAMLError

from drafthead.eval_config import EvalConfig
from drafthead.responses_config import ResponsesConfig
from drafthead.section import Section

REPO_ROOT = Path(__file__).resolve().parent.parent
DEFAULT_RECIPE = REPO_ROOT / "configs" / "tiny.yaml"


class TargetConfig(Section):
    """The frozen model that verifies, and where its hidden states are tapped."""

    path: str  # a directory (relative to the checkout or absolute) or a hub id
    revision: str | None = None
    dtype: Literal["bfloat16", "float32", "auto"] = "bfloat16"
    # Boundary indices, ascending: tap k is the input of block k, vLLM's own numbering.
    tap_ids: tuple[int, ...]
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _check_taps(self) -> Self:
        if not self.tap_ids or list(self.tap_ids) != sorted(set(self.tap_ids)) or self.tap_ids[0] < 0:
            raise ValueError(
                f"target.tap_ids {list(self.tap_ids)} must be ascending, distinct and not negative: "
                "vLLM sorts them, which would silently permute the columns of fc"
            )
        return self


class EngineConfig(Section):
    """vLLM settings shared by regeneration, harvesting and evaluation."""

    max_model_len: int = Field(gt=0)
    max_num_seqs: int = Field(default=64, gt=0)
    max_num_batched_tokens: int | None = None  # None: vLLM's own choice
    tensor_parallel_size: int = Field(default=1, gt=0)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    kv_cache_space_gib: int = Field(default=1, gt=0)  # CPU only


class PromptSource(Section):
    """One source of a mix. Exactly one of `train`, `weight` and `categories` says how much of it is trained on."""

    name: str  # of drafthead/generation/sources/catalogue.py, or any name together with a path
    path: str | None = None  # file or folder, relative to the checkout or absolute; None: the hub's cache
    train: int | None = Field(default=None, ge=0)  # training prompts
    weight: float | None = Field(default=None, gt=0)  # share of all training prompts, relative to the other weights
    heldout: int = Field(default=0, ge=0)  # held-out prompts
    # Category -> weight within the source; without `train` and `weight`, category -> number of training prompts.
    categories: dict[str, Annotated[float, Field(ge=0)]] | None = None
    turns: Literal["first", "last", "all"] = "last"  # which of a conversation's questions become prompts
    heldout_share: float | None = Field(default=None, gt=0, le=1)  # of the documents; None: the catalogue's

    @model_validator(mode="after")
    def _check_amount(self) -> Self:
        if self.train is not None and self.weight is not None:
            raise ValueError(f"source {self.name} has both train {self.train} and weight {self.weight}: keep one")
        counts = self.categories if self.train is None and self.weight is None else None
        for category, count in (counts or {}).items():
            if count != int(count):
                raise ValueError(
                    f"source {self.name}: category {category} has {count} where a number of prompts is wanted; "
                    "with `train` or `weight` on the source, categories are weights"
                )
        return self


class PromptsConfig(Section):
    """Which conversations the head learns from and is judged on. Exactly one of path, preset and sources is given."""

    path: str | None = None  # JSONL with the columns of drafthead.data.prompts.Prompt, and a split on every line
    preset: Literal["standard"] | None = None  # ShareGPT, MLPerf gpt-oss and SWE-bench
    sources: tuple[PromptSource, ...] | None = None
    # None: all; otherwise an even draw per category, or what the weights of a mix share.
    max_train: int | None = Field(default=None, gt=0)
    max_heldout: int | None = Field(default=None, gt=0)
    validation: int = Field(default=48, gt=0)  # drawn from the training split; picks the checkpoint
    seed: int = 0
    # For chat templates that write the current date, such as gpt-oss's; None: the day the prompts were made.
    date: datetime.date | None = None

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        given = [name for name in ("path", "preset", "sources") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, preset and sources, found {' and '.join(given) or 'none'}")
        names = [source.name for source in self.sources or ()]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"source {min(twice)} is given twice: name each once, with a path of its own if need be")
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        weighted = [s.name for s in self.sources or () if s.weight is not None]
        counted = [s.name for s in self.sources or () if s.train or (s.categories and s.weight is None)]
        if weighted and counted:
            raise ValueError(f"{weighted[0]} has a weight and {counted[0]} a number of prompts: use one kind for all")
        return self


class StatesConfig(Section):
    """How hidden states are harvested."""

    backend: Literal["vllm", "transformers"] = "vllm"
    format: Literal["bf16", "fp8"] = "bf16"  # of the taps; fp8: e4m3 with one scale per token and tap, half the bytes
    sequences_per_shard: int = Field(default=1024, gt=0)
    # Online mode: at most this many training shards on disk at once, harvested while training reads them.
    spool_shards: int | None = Field(default=None, ge=2)  # None: the whole store is harvested first, and kept
    one_pass: bool = False  # capture the states while the target answers, instead of reading its answers once more

    @model_validator(mode="after")
    def _check_one_pass(self) -> Self:
        if self.one_pass and (self.backend != "vllm" or self.spool_shards is not None):
            raise ValueError(
                f"one_pass captures inside vLLM and into a whole store: states.backend {self.backend} and "
                f"states.spool_shards {self.spool_shards} do not go with it; set one_pass to false"
            )
        return self


class HeadConfig(Section):
    """The draft model's shape. Hidden size, vocabulary and RoPE are the target's."""

    # How many target tokens the head can propose: a number, or as many as make up a share of the generated tokens.
    draft_vocab_size: int = Field(default=0, ge=0)  # 0: chosen by coverage
    coverage: float | None = Field(default=None, gt=0, le=1)
    num_layers: int = Field(default=1, gt=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    norm_before_residual: bool = False
    norm_before_fc: bool = True
    fc_norm: bool = False
    norm_output: bool = False

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"head.num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"head.num_key_value_heads {self.num_key_value_heads}"
            )
        return self

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if bool(self.draft_vocab_size) == (self.coverage is not None):
            raise ValueError(
                f"head.draft_vocab_size {self.draft_vocab_size} and head.coverage {self.coverage}: set exactly one; "
                "with head.coverage=0.98 leave head.draft_vocab_size out, or set it to 0"
            )
        return self

    def sized(self, draft_vocab_size: int) -> "HeadConfig":
        """The head with the draft vocabulary it got: unchanged unless its size was chosen by coverage."""
        return self if self.coverage is None else self.model_copy(update={"draft_vocab_size": draft_vocab_size})


class TrainConfig(Section):
    """One training run."""

    start_from: str | None = None  # runs/OTHER, or one of its checkpoints, below output_dir; None: from the target
    num_ttt_steps: int = Field(default=4, gt=0)
    objective: Literal["forward_kl", "reverse_kl", "total_variation", "lk_hybrid", "greedy_acceptance"] = "forward_kl"
    step_weight_decay: float = Field(default=0.8, gt=0, le=1)  # weight of TTT step k is decay**k
    epochs: int = Field(default=1, gt=0)
    tokens_per_batch: int = Field(gt=0)  # one packed micro batch on one rank
    # Micro batches of one optimiser step over all ranks; accumulation follows from the number of ranks, so the
    # same recipe takes the same steps on any machine.
    batches_per_step: int = Field(default=1, gt=0)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices between hidden states; the rest stays AdamW
    learning_rate: float = Field(gt=0)
    muon_learning_rate: float = Field(default=0.02, gt=0)  # in units of spectral norm per step
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    ema_decay: float | None = Field(default=None, gt=0, lt=1)  # validate and export the weights' moving average
    precision: Literal["fp32", "bf16"] = "bf16"
    zero_stage: Literal[0, 1, 2, 3] = 1
    gradient_checkpointing: bool = False  # recompute TTT steps in the backward: less memory, about a third more work
    compile: bool = False  # torch.compile of the engine; needs a C++ compiler on CPU
    checkpoint_every: int = Field(gt=0)  # optimiser steps; also when validation runs
    keep_checkpoints: int = Field(default=2, gt=0)
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    zero_hidden_states: bool = False  # control experiment: hide the target's states from the head
    seed: int = 0

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ValueError(
                "train.precision bf16 with train.zero_stage 0 starts Adam's bias correction one step off "
                "in DeepSpeed: set train.zero_stage to 1 or higher"
            )
        if self.optimizer == "muon" and self.zero_stage == 0:
            raise ValueError(
                "train.optimizer muon with train.zero_stage 0 would step on a gradient whose norm nobody checks: "
                "set train.zero_stage to 1 or higher"
            )
        return self


class ExportConfig(Section):
    """What is written for the serving engine."""

    dtype: Literal["bfloat16", "float32", "fp8"] = "bfloat16"  # fp8: projections only; what it costs is measured
    format: Literal["vllm", "speculators"] = "vllm"  # speculators: `vllm serve HEAD` finds the target by itself
    max_position_embeddings: int | None = Field(default=None, gt=0)  # None: the target's
    # Longest position the head was trained on: rotate by YaRN from there to max_position_embeddings.
    yarn_from: int | None = Field(default=None, gt=0)
    license: str | None = None  # for the model card; a Hugging Face licence id


class Recipe(Section):
    """One head, from prompts to verdict."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # a folder name: cannot leave output_dir
    output_dir: str = "."
    target: TargetConfig
    engine: EngineConfig
    prompts: PromptsConfig
    responses: ResponsesConfig
    states: StatesConfig
    head: HeadConfig
    train: TrainConfig
    export: ExportConfig
    eval: EvalConfig

    @model_validator(mode="after")
    def _check_across(self) -> Self:
        if self.eval.num_draft_tokens > self.train.num_ttt_steps:
            raise ValueError(
                f"eval.num_draft_tokens {self.eval.num_draft_tokens} exceeds train.num_ttt_steps "
                f"{self.train.num_ttt_steps}: acceptance beyond the trained depth cannot be predicted; "
                "raise train.num_ttt_steps, or name a smaller K first"
            )
        every = [source.name for source in self.prompts.sources or () if source.turns == "all"]
        if every and self.responses.turn_by_turn:
            raise ValueError(
                f"prompts.sources: {every[0]} makes a prompt of every question (turns: all), and responses.history "
                "regenerated answers every question of each: the first ones again and again. Set its turns to last, "
                "or responses.history to given"
            )
        if self.states.one_pass and (self.responses.server_url or not self.responses.regenerate):
            raise ValueError(
                "states.one_pass captures states in an engine of our own while it answers: not on a server "
                f"(responses.server_url {self.responses.server_url}), nor without answering (responses.regenerate "
                f"{str(self.responses.regenerate).lower()}); set states.one_pass to false"
            )
        longest = max(self.responses.max_tokens, self.eval.max_tokens)
        if longest >= self.engine.max_model_len:
            raise ValueError(
                f"max_tokens {longest} leaves no room for a prompt in engine.max_model_len {self.engine.max_model_len}"
            )
        return self

    @property
    def target_path(self) -> str:
        """The target as a path from the checkout when it is one, else the hub id as written."""
        return local_or_hub("target.path", self.target.path)

    def directory(self, *parts: str) -> Path:
        """A folder below output_dir; a relative output_dir counts from the checkout."""
        return REPO_ROOT.joinpath(self.output_dir, *parts)

    @property
    def prompts_dir(self) -> Path:
        return self.directory("data", self.name, "prompts")

    def responses_dir(self, split: str) -> Path:
        return self.directory("data", self.name, "responses", split)

    def states_dir(self, split: str) -> Path:
        return self.directory("data", self.name, "states", split)

    @property
    def run_dir(self) -> Path:
        return self.directory("runs", self.name)

    @property
    def head_dir(self) -> Path:
        suffix = "" if self.export.format == "vllm" else f"-{self.export.format}"
        return self.directory("heads", self.name + suffix)

    @property
    def results_dir(self) -> Path:
        return self.directory("results", self.name)


def local_or_hub(key: str, path: str) -> str:
    """A model as a path from the checkout when it is one, else the hub id as written.

    Raises:
        FileNotFoundError: it looks like a path and does not exist; the message names `key`.
    """
    local = REPO_ROOT / path
    if local.exists():
        return str(local)
    if path.startswith((".", "/")) or path.count("/") > 1:
        raise FileNotFoundError(
            f"{key} {path} does not exist (looked at {local}): "
            "give a directory with config.json, or a hub id such as openai/gpt-oss-120b"
        )
    return path


def load_recipe(path: str | os.PathLike[str] = DEFAULT_RECIPE, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply dotted overrides.

    Raises:
        FileNotFoundError: the recipe does not exist.
        ValueError: it is not valid; the message names each key, its value and what is wrong.
    """
    path = Path(path)
    if not path.is_file():
        known = ", ".join(sorted(str(p.relative_to(REPO_ROOT)) for p in DEFAULT_RECIPE.parent.glob("*.yaml")))
        raise FileNotFoundError(f"recipe {path} does not exist; the checkout has: {known}")
    malformed = [item for item in overrides if "=" not in item]
    if malformed:
        raise ValueError(f"override {malformed[0]!r} is not of the form section.key=value")
    # `${oc.env:HF_TOKEN}` in somebody's recipe would carry a secret into manifests and the model card.
    if interpolated := [item for item in overrides if "${" in item]:
        raise ValueError(f"override {interpolated[0]!r}: nothing is interpolated in a recipe; write the value")
    try:
        recipe = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # not readable; without a number it says that this is no mapping
            raise
        raise ValueError(f"recipe {path} is not valid YAML in UTF-8: {error}") from error
    for item in overrides:  # a mapping replaces what is there, as a number does: half a distribution is none
        try:
            key = item.partition("=")[0]
            OmegaConf.update(recipe, key, OmegaConf.select(OmegaConf.from_dotlist([item]), key), merge=False)
        except (YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
            raise ValueError(f"override {item!r} does not fit recipe {path}: {error}") from error
    values = OmegaConf.to_container(recipe, resolve=False)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError(_readable(path, error)) from error


def _readable(path: Path, error: ValidationError) -> str:
    lines = [f"recipe {path} is not valid:"]
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        given = problem["input"]
        shown = "" if isinstance(given, dict) else f" (given: {given!r})"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message, shown = "unknown key; see drafthead/config.py for the known ones", ""
        lines.append(f"  {key}: {message}{shown}" if key else f"  {message}")
    return "\n".join(lines)
