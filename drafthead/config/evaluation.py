"""The recipe's section on evaluation: methods, the conditions they are measured under, and the loads of a server.

Every list also takes a single value. The first value of a list is the main one: the report, the model card and
the choice of a checkpoint use it, the others stand beside it in the tables of eval/acceptance.py.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from drafthead.section import Section

# The recipe's head, drafting as its head.type does, and vLLM's methods that this project measures.
Method = Literal[
    "head", "eagle3", "eagle", "medusa", "draft_model", "dflash", "dspark", "mtp", "ngram", "ngram_gpu", "suffix"
]  # fmt: skip
HEAD: Method = "head"  # name and method of the recipe's head; what vLLM calls it follows from head.type
# The same with sampled drafts, measured beside it wherever responses are sampled: at T = 0 the two are the same.
SAMPLED = f"{HEAD}.sampled"
ALL = "all"  # the workload of every held-out prompt
CONVERSATIONS = "multi-turn"  # the workload of those that share a prefix, turn by turn
SEED = 0  # of sampled responses, of random prompts, and of the order in which prompts are sent
Effort = Literal["low", "medium", "high"]
_Item = TypeVar("_Item")


def _as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def _distinct(values: Sequence[_Item], of: str = "") -> Sequence[_Item]:
    if twice := [value for value in values if list(values).count(value) > 1]:
        raise ValueError(f"{of}{twice[0]} is given twice")
    return values


def _as_loads(value: Any) -> Any:
    return [item if isinstance(item, (dict, Section)) else {"concurrency": item} for item in _as_list(value)]


def _as_methods(value: Any) -> Any:
    return [{"name": item, "method": item} if isinstance(item, str) else item for item in _as_list(value)]


Listed = Annotated[tuple[_Item, ...], BeforeValidator(_as_list), AfterValidator(_distinct), Field(min_length=1)]

# Methods that draft with a model which `head` names, and where one comes from.
HEADS = {
    "eagle3": "the recipe's head is the method `head`; export/import_head.py takes a public one",
    "eagle": "train one with the EAGLE authors' code (github.com/SafeAILab/EAGLE) and convert it to the layout of "
    "vLLM's EagleLlamaForCausalLM",
    "medusa": "train heads with github.com/FasterDecoding/Medusa and convert them to the layout of vLLM's MedusaModel",
    "draft_model": "any smaller model with the target's vocabulary, such as one of the same family",
    "dflash": "a head in the layout of vLLM's DFlash models, made for this target",
    "dspark": "a head in the layout of vLLM's DSpark models, made for this target",
}
# Methods that need no entry in eval.methods.
UNLISTED = (SAMPLED, *(method for method in get_args(Method) if method not in HEADS))


class MethodConfig(Section):
    """One way to speculate. A plain method name stands for a method of that name with the recipe's settings."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._]*$")  # part of a file name; no dash, it separates there
    method: Method
    head: str | None = None  # directory or hub id of the draft model; None with HEAD: heads/NAME of the recipe
    num_draft_tokens: Listed[Annotated[int, Field(gt=0)]] | None = None  # None: eval.num_draft_tokens
    extra: dict[str, Any] = Field(default_factory=dict)  # further keys of vLLM's speculative_config

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        if self.name == "none":
            raise ValueError("method name none: that is the baseline, which is always measured")
        if self.method in HEADS and not self.head:
            raise ValueError(
                f"method {self.name}: method {self.method} needs `head`, a directory or a hub id; {HEADS[self.method]}"
            )
        if self.method not in (HEAD, *HEADS) and self.head:
            raise ValueError(f"method {self.name}: method {self.method} drafts without a model; leave `head` out")
        if taken := {"method", "model", "num_speculative_tokens"} & set(self.extra):
            raise ValueError(
                f"method {self.name}: `extra` has {min(taken)}, which method, head and num_draft_tokens set already"
            )
        return self


class LoadConfig(Section):
    """One load: at most `concurrency` requests in flight, sent as places become free or at a given rate."""

    concurrency: int | None = Field(default=None, gt=0)  # None: no cap, which needs a rate
    request_rate: float | None = Field(default=None, gt=0)  # requests per second; None: as places become free
    burstiness: float = Field(default=1.0, gt=0)  # shape of the gamma-distributed gaps: 1 Poisson, below 1 burstier

    @model_validator(mode="after")
    def _check_load(self) -> Self:
        if self.concurrency is None and self.request_rate is None:
            raise ValueError("a load needs concurrency, request_rate or both")
        if self.request_rate is None and self.burstiness != 1.0:
            raise ValueError(f"burstiness {self.burstiness} shapes a request_rate: give one")
        return self

    @property
    def name(self) -> str:
        """Short and fit for a file name: c8, r8, r8-b0.2-c32."""
        rate = f"r{self.request_rate:g}" if self.request_rate else ""
        burstiness = f"b{self.burstiness:g}" if self.burstiness != 1.0 else ""
        return "-".join(filter(None, (rate, burstiness, f"c{self.concurrency}" if self.concurrency else "")))


Loads = Annotated[tuple[LoadConfig, ...], BeforeValidator(_as_loads)]  # a number is a concurrency


class EndpointConfig(Section):
    """A server that somebody else started: any OpenAI-compatible one with /v1/completions."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._]*$")
    url: str  # http://host:port, with a path where the server's /v1 is not at the root
    model: str  # the name that requests must use
    api_key_env: str | None = None  # environment variable that holds the key

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if not re.fullmatch(r"https?://(\[[\da-fA-F:.]+\]|[\w.-]+)(:[1-9]\d{0,4})?(/[\w.~-]+)*/?", self.url):
            shown = "" if {"@", "?"} & {*self.url} else f" {self.url!r}"  # not repeated where it may hold the secret
            raise ValueError(
                f"endpoint {self.name}: url{shown} must be http://host:port or http://host:port/path, without user or "
                "query, which would end up in manifests; give a key in an environment variable and name that in "
                "api_key_env"
            )
        return self

    @property
    def base_url(self) -> str:
        """What /v1/completions is appended to; OpenAI's clients write the /v1 as a part of it."""
        return self.url.rstrip("/").removesuffix("/v1")


class TrafficConfig(Section):
    """What the deployment serves; the verdict is about this and nothing else."""

    # Requests in flight -> share of the time; None: every measured load alike.
    concurrency: dict[PositiveInt, PositiveFloat] | None = None
    workload: str | None = None  # of those measured; None: all prompts, and conversations where the head loses on them

    def shares(self, measured: Iterable[int]) -> dict[int, float]:
        """Requests in flight -> share, summing to 1; every measured load alike where the recipe says nothing."""
        given = self.concurrency or dict.fromkeys(measured, 1.0)
        total = sum(given.values())
        return {load: share / total for load, share in sorted(given.items())}


class SLOConfig(Section):
    """The service level: a load at which it is missed is no load to deploy at. None: no limit."""

    ttft_ms: float | None = Field(default=None, gt=0)  # time to first token
    tpot_ms: float | None = Field(default=None, gt=0)  # time per output token after it
    percentile: Literal[50, 90, 95, 99] = 95  # of requests that must keep it


class EvalConfig(Section):
    """What the head is measured against, and how."""

    draft_tokens: Listed[Annotated[int, Field(gt=0)]] = Field(default=(3,), alias="num_draft_tokens")
    methods: Annotated[tuple[MethodConfig, ...], BeforeValidator(_as_methods), Field(min_length=1)] = (
        MethodConfig(name=HEAD, method=HEAD),
        MethodConfig(name="ngram", method="ngram"),
    )
    temperatures: Listed[Annotated[float, Field(ge=0)]] = (0.0,)
    reasoning_efforts: Listed[Effort] = Field(
        default=("medium",), validation_alias=AliasChoices("reasoning_efforts", "reasoning_effort")
    )
    max_tokens: int = Field(gt=0)
    # Requests in flight; an entry that is a mapping is a load with a request rate.
    loads: Annotated[Loads, Field(min_length=1)] = Field(
        default=(LoadConfig(concurrency=1), LoadConfig(concurrency=8)), alias="concurrency"
    )
    served: Listed[str] = (HEAD,)  # methods that get a server, at every K of theirs
    endpoints: tuple[EndpointConfig, ...] = ()  # measured beside the servers that are started here
    # Each of them is measured under every load alone as well; all: only all held-out prompts together.
    workloads: Literal["source", "category", "all"] = "source"
    prompts_per_level: int = Field(default=64, gt=0)
    repeats: int = Field(default=1, gt=0)  # ABBA blocks of server restarts; their spread widens the intervals
    price_per_gpu_hour: float | None = Field(default=None, gt=0)
    traffic: TrafficConfig = TrafficConfig()
    slo: SLOConfig = SLOConfig()

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        names = [method.name for method in self.methods] + [endpoint.name for endpoint in self.endpoints]
        if taken := {endpoint.name for endpoint in self.endpoints} & {"none", *UNLISTED}:
            raise ValueError(f"eval.endpoints: {min(taken)} names a method here; give the endpoint another name")
        _distinct(names, "eval.methods: ")
        _distinct([load.name for load in self.loads], "eval.concurrency: ")
        known = dict.fromkeys([*(method.name for method in self.methods), *UNLISTED])
        if unknown := [name for name in self.served if name not in known]:
            raise ValueError(f"eval.served has {unknown[0]}, which is no method; choose from {', '.join(known)}")
        return self

    @property
    def num_draft_tokens(self) -> int:
        """The main K."""
        return self.draft_tokens[0]

    @property
    def reasoning_effort(self) -> Effort:
        """The main reasoning effort."""
        return self.reasoning_efforts[0]

    @property
    def steady_loads(self) -> tuple[LoadConfig, ...]:
        """Those without a request rate."""
        return tuple(load for load in self.loads if load.request_rate is None)

    def draft_tokens_of(self, method: MethodConfig) -> tuple[int, ...]:
        """Every K a method is measured at, the main one first."""
        return method.num_draft_tokens or self.draft_tokens
