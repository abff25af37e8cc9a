"""One head, from prompts to verdict: the sections of a recipe, and where its stages write.

The sections on training and evaluation have files of their own, the head's stands with its drafter. Distributions are
lists of equal or mappings of weighted values; each conversation draws from them by a hash of `prompts.seed` and its
prompt's id (drafthead/generation/dialogue.py), so a restart draws the same.
"""

import datetime
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from drafthead.config.evaluation import Effort, EvalConfig
from drafthead.config.train import TrainConfig
from drafthead.drafters.registry import Head
from drafthead.section import Section, Seed

REPO_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_RECIPE = REPO_ROOT / "configs" / "tiny.yaml"


# Arguments of `apply_chat_template`, and where they come from.
_SET_ELSEWHERE = {
    "reasoning_effort": "responses.reasoning_efforts and eval.reasoning_efforts", "strftime_now": "prompts.date",
    "tools": "the prompts", "documents": "the prompts", "messages": "the prompts",
} | dict.fromkeys(
    (
        "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "chat_template",
        "padding", "truncation", "max_length", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs",
    ),
    "this project",
)  # fmt: skip


class TargetConfig(Section):
    """The frozen model that verifies, and where its hidden states are read."""

    path: str  # a directory (relative to the checkout or absolute) or a hub id
    revision: str | None = None
    dtype: Literal["bfloat16", "float32", "auto"] = "bfloat16"
    # Boundary indices, ascending: id k is the input of block k, vLLM's own numbering.
    aux_layer_ids: tuple[int, ...]
    trust_remote_code: bool = False
    # Further arguments of the chat template, as in requests to vLLM: {enable_thinking: false}. A part of the target.
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_chat_template_kwargs(self) -> Self:
        if taken := sorted(_SET_ELSEWHERE.keys() & self.chat_template_kwargs.keys()):
            raise ValueError(
                f"target.chat_template_kwargs has {taken[0]}, which comes from {_SET_ELSEWHERE[taken[0]]}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_layer_ids(self) -> Self:
        ids = list(self.aux_layer_ids)
        if not ids or ids != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(
                f"target.aux_layer_ids {ids} must be ascending, distinct and not negative: "
                "vLLM sorts them, which would silently permute the columns of fc"
            )
        return self


class EngineConfig(Section):
    """vLLM settings shared by regeneration, harvesting and evaluation."""

    max_model_len: int = Field(gt=0)
    max_num_seqs: int = Field(default=64, gt=0)
    max_num_batched_tokens: int | None = Field(default=None, gt=0)  # None: vLLM's own choice
    tensor_parallel_size: int = Field(default=1, gt=0)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)  # on CPU: VLLM_CPU_KVCACHE_SPACE, in GiB


_Count = Annotated[int, Field(ge=0)]


class PromptSource(Section):
    """One source of a mix. Without `train` and `heldout`, no prompt that overlaps it is trained on."""

    name: str  # of drafthead/generation/sources.yaml, or any name together with a path
    path: str | None = None  # file or folder, relative to the checkout or absolute; None: the hub's cache
    train: _Count | dict[str, _Count] = 0  # prompts; by category: categories that are not listed are not read
    heldout: _Count = 0  # prompts
    turns: Literal["first", "last", "all"] = "last"  # which user messages of a conversation become prompts
    heldout_share: float | None = Field(default=None, gt=0, le=1)  # of the documents; None: the catalogue's

    @property
    def to_train(self) -> int:
        """Prompts to train on, of all categories."""
        return sum(self.train.values()) if isinstance(self.train, dict) else self.train


class PromptsConfig(Section):
    """Which conversations the head learns from and is judged on: either path or sources is given."""

    path: str | None = None  # one file of prompts (docs/prompts.md), whose rows may declare their split
    sources: tuple[PromptSource, ...] | None = None
    max_train: int | None = Field(default=None, gt=0)  # None: all; otherwise drawn evenly from the categories
    max_heldout: int | None = Field(default=None, gt=0)
    validation: int = Field(default=48, gt=0)  # drawn from the training split; picks the checkpoint
    seed: Seed = 0  # of every draw: prompts here, temperature, effort and sampling of responses
    # For chat templates that write the current date, such as gpt-oss's; None: the day the prompts were made.
    date: datetime.date | None = None

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        if bool(self.path) == bool(self.sources):
            raise ValueError(f"give either path or sources, found {'both' if self.path else 'none'}")
        names = [source.name for source in self.sources or ()]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"source {min(twice)} is given twice: name each once, with a path of its own if need be")
        return self


Weight = Annotated[int, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0)]
Fault = Literal["truncated", "refused", "looping"]  # how they are told: drafthead/generation/dialogue.py


class ResponsesConfig(Section):
    """How the training prompts get their responses. Those to validation prompts are always generated, greedily."""

    regenerate: bool = True  # False: training keeps the responses that the data has
    # Earlier responses of a chat: the target's own, every turn generated in order, or those of the data.
    history: Literal["regenerated", "given"] = "regenerated"
    # One value, or value -> weight (whole numbers): one is drawn per conversation.
    temperature: Temperature | Annotated[dict[Temperature, Weight], Field(min_length=1)] = 1.0
    reasoning_efforts: tuple[Effort, ...] | dict[Effort, Weight] = Field(default=("medium",), min_length=1)
    max_tokens: int = Field(gt=0)
    prompts_per_part: int = Field(default=1024, gt=0)
    # Which faulty responses are left out. None by default: the target generates such responses in production too.
    drop: tuple[Fault, ...] = ()

    def drops(self, flags: Iterable[str]) -> bool:
        """Whether a response with these flags is left out."""
        return not set(self.drop).isdisjoint(flags)

    def regenerates(self, split: str) -> bool:
        """Whether the target generates a split: validation always, as acceptance is replayed over its own text."""
        return self.regenerate or split == "validation"

    @property
    def temperatures(self) -> dict[float, int]:
        """Temperature -> weight."""
        return self.temperature if isinstance(self.temperature, dict) else {self.temperature: 1}

    @property
    def efforts(self) -> dict[Effort, int]:
        """Reasoning effort -> weight."""
        return Counter(self.reasoning_efforts)

    @property
    def turn_by_turn(self) -> bool:
        """Whether every turn of a chat is generated, on top of the target's own earlier responses."""
        return self.regenerate and self.history == "regenerated"


class StatesConfig(Section):
    """How hidden states are harvested."""

    backend: Literal["vllm", "transformers"] = "vllm"
    # Of the aux layers; fp8: e4m3 with one scale per token and aux layer, half the bytes of bf16.
    format: Literal["bf16", "fp8"] = "fp8"
    sequences_per_shard: int = Field(default=1024, gt=0)
    # Online mode: at most this many training shards on disk at once, harvested while training reads them.
    spool_shards: int | None = Field(default=None, ge=2)  # None: the whole store is harvested first, and kept
    # Share of a prompt, counted from its end, that is learned too: more accepted drafts for more time and disk.
    prompt_loss: float = Field(default=0.0, ge=0, le=1)

    def learned_share(self, split: str) -> float:
        """Of a split's prompts; validation replays responses."""
        return self.prompt_loss if split == "train" else 0


class ExportConfig(Section):
    """What is written for the serving engine."""

    format: Literal["vllm", "speculators"] = "vllm"  # speculators: `vllm serve HEAD` finds the target by itself
    license: str | None = None  # for the model card; a Hugging Face licence id


class AdaptConfig(Section):
    """How a served head is kept good: what is captured, when it is trained on, what is promoted (docs/adapting.md)."""

    rate: float = Field(default=0.1, ge=0, le=1)  # share of the requests with consent whose tokens are captured
    consent: Literal["asked", "given"] = "asked"  # asked: only requests that say yes; given: all that do not say no
    redact: str | None = None  # package.module:function of (prompt_ids, response_ids): what is kept of them, or None
    retention_days: float = Field(default=30, gt=0)  # of what was captured, and never more than 4 GiB
    min_tokens: int = Field(default=40_000, gt=0)  # captured since the alarm, prompts and responses, before a training
    replay_share: float = Field(default=0.25, ge=0, lt=1)  # of the trained rows: from the head's first training
    trial_requests: int = Field(default=100, ge=0)  # of each head before a promotion, at least 16; 0: no trial
    max_regression: float = Field(default=0.3, gt=0)  # tokens of acceptance length that no workload may lose, at 97.5 %


class Recipe(Section):
    """One head, from prompts to verdict."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # a folder name: cannot leave output_dir
    output_dir: str = "."
    # Name of the recipe whose prompts, responses and states are used, for several heads from one store; None: this one.
    data: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    target: TargetConfig
    engine: EngineConfig
    prompts: PromptsConfig
    responses: ResponsesConfig
    states: StatesConfig
    head: Head
    train: TrainConfig
    export: ExportConfig = ExportConfig()
    eval: EvalConfig
    adapt: AdaptConfig = AdaptConfig()

    @model_validator(mode="after")
    def _check_across(self) -> Self:
        if self.eval.num_draft_tokens > self.head.num_positions:
            raise ValueError(
                f"eval.num_draft_tokens {self.eval.num_draft_tokens} exceeds the {self.head.num_positions} draft "
                "positions that the head section trains: acceptance beyond them cannot be predicted; train more, or "
                "name a smaller K first"
            )
        if self.head.num_attention_heads % self.engine.tensor_parallel_size:
            raise ValueError(
                f"head.num_attention_heads {self.head.num_attention_heads} cannot be split over "
                f"engine.tensor_parallel_size {self.engine.tensor_parallel_size} GPUs, as vLLM splits the draft with "
                "its target; choose a multiple"
            )
        tp, kv_heads = self.engine.tensor_parallel_size, self.head.num_key_value_heads
        if kv_heads % tp and tp % kv_heads:
            raise ValueError(
                f"head.num_key_value_heads {kv_heads} can be neither split over engine.tensor_parallel_size {tp} GPUs "
                "nor copied evenly to them, which vLLM asks for; choose a multiple or a divisor"
            )
        every = [source.name for source in self.prompts.sources or () if source.turns == "all"]
        if every and self.responses.turn_by_turn:
            raise ValueError(
                f"prompts.sources: {every[0]} makes a prompt of every question (turns: all), and responses.history "
                "regenerated answers every question of each: the first ones again and again. Set its turns to last, "
                "or responses.history to given"
            )
        longest = max(self.responses.max_tokens, self.eval.max_tokens)
        if longest >= self.engine.max_model_len:
            raise ValueError(
                f"max_tokens {longest} leaves no room for a prompt in engine.max_model_len {self.engine.max_model_len}"
            )
        return self

    def changed(self, section: str, **settings: Any) -> Self:
        """The same but for settings of one section, which are not checked again."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=settings)})

    @property
    def target_path(self) -> str:
        """The target as a path from the checkout when it is one, else the hub id as written."""
        return local_or_hub("target.path", self.target.path)

    def directory(self, *parts: str) -> Path:
        """A folder below output_dir; a relative output_dir counts from the checkout."""
        return on_disk(self.output_dir).joinpath(*parts)

    @property
    def prompts_dir(self) -> Path:
        return self.directory("data", self.data or self.name, "prompts")

    def responses_dir(self, split: str) -> Path:
        return self.directory("data", self.data or self.name, "responses", split)

    def states_dir(self, split: str) -> Path:
        return self.directory("data", self.data or self.name, "states", split)

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


def on_disk(path: str) -> Path:
    """A path of a recipe: relative ones count from the checkout, ~ is the home folder.

    Raises:
        ValueError: the home folder is not known.
    """
    if (expanded := os.path.expanduser(path)).startswith("~"):
        raise ValueError(f"{path}: the home folder of that user is not known; write the path out")
    return REPO_ROOT / expanded


def local_or_hub(key: str, path: str) -> str:
    """A model as a path from the checkout when it is one, else the hub id as written.

    Raises:
        FileNotFoundError: it looks like a path and does not exist; the message names `key`.
    """
    local = on_disk(path)
    if local.exists():
        return str(local)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise FileNotFoundError(
            f"{key} {path} does not exist (looked at {local}): "
            "give a directory with config.json, or a hub id such as openai/gpt-oss-120b"
        )
    return path
