"""One head, from prompts to verdict: all sections of a recipe, and where its stages write."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from drafthead.config.evaluation import EvalConfig
from drafthead.config.export import ExportConfig
from drafthead.config.prompts import PromptsConfig
from drafthead.config.responses import ResponsesConfig
from drafthead.config.states import StatesConfig
from drafthead.config.target import EngineConfig, TargetConfig
from drafthead.config.train import TrainConfig
from drafthead.drafters.registry import Head
from drafthead.section import Section

REPO_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_RECIPE = REPO_ROOT / "configs" / "tiny.yaml"


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
        every = [source.name for source in self.prompts.sources or () if source.turns == "all"]
        if every and self.responses.turn_by_turn:
            raise ValueError(
                f"prompts.sources: {every[0]} makes a prompt of every question (turns: all), and responses.history "
                "regenerated answers every question of each: the first ones again and again. Set its turns to last, "
                "or responses.history to given"
            )
        if self.states.one_pass and not self.responses.regenerate:
            raise ValueError(
                "states.one_pass captures states while the target generates, but responses.regenerate is false; set "
                "states.one_pass to false"
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
