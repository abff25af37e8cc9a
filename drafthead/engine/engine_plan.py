"""What an engine needs on a GPU, before one is started: weights, and a cache for what is under way at once.

A plan is what must fit; vLLM itself takes engine.gpu_memory_utilization of a GPU, whatever it is given, and keeps
fewer sequences under way where the cache is short. Left out: activations and CUDA graphs, a few GiB.
"""

from dataclasses import dataclass
from functools import cached_property

from drafthead.config import Recipe
from drafthead.engine.rates import Gpu, Rate, decode_rate, gpu_named, prefill_rate
from drafthead.stage_plan import Assumed, size_text
from drafthead.target.size import TargetSize, target_size

_BLOCK = 16  # tokens in a block of vLLM's cache


@dataclass(frozen=True)
class EnginePlan:
    """One engine of a recipe on an assumed GPU.

    Attributes:
        recipe: target and engine sections are used.
        assumed: of the command line.
        draft_bytes: weights of a draft head beside the target's.
    """

    recipe: Recipe
    assumed: Assumed
    draft_bytes: int = 0

    @cached_property
    def size(self) -> TargetSize:
        target = self.recipe.target
        return target_size(self.recipe.target_path, target.revision, target.trust_remote_code)

    @property
    def gpus(self) -> int:
        return self.recipe.engine.tensor_parallel_size

    @property
    def gpu(self) -> Gpu:
        return gpu_named(self.assumed.gpu)

    @property
    def weight_bytes(self) -> int:
        """On one GPU."""
        return (self.size.weight_bytes + self.draft_bytes) // self.gpus

    @property
    def cache_room(self) -> int:
        """What vLLM leaves for the cache on one GPU; negative when the weights do not fit."""
        return int(self.gpu.memory * self.recipe.engine.gpu_memory_utilization) - self.weight_bytes

    def under_way(self, tokens: float) -> int:
        """How many sequences of that length run at once: engine.max_num_seqs, or as many as fit; at least 1."""
        one = max(self.size.cache_bytes(tokens) // self.gpus, 1)
        return max(1, min(self.recipe.engine.max_num_seqs, self.cache_room // one))

    def memory_bytes(self, tokens: float, sequences: int) -> int:
        """On one GPU, with that many sequences of that length under way."""
        return self.weight_bytes + sequences * self.size.cache_bytes(tokens) // self.gpus

    def decode(self, context: float, sequences: int) -> Rate:
        """Tokens per second said, assumed from the GPU's data sheet."""
        return decode_rate(self.size, self.gpu, self.gpus, sequences, context)

    def prefill(self) -> Rate:
        """Tokens per second read, assumed from the GPU's data sheet."""
        return prefill_rate(self.size, self.gpu, self.gpus)

    def notes(self, tokens: float) -> tuple[str, ...]:
        """What the reader must know of the memory."""
        size, gpu, found = self.size, self.gpu, []
        if self.cache_room <= 0:
            found.append(
                f"weights of {size_text(self.weight_bytes)} do not fit {self.recipe.engine.gpu_memory_utilization:.0%} "
                f"of the {size_text(gpu.memory)} of a {gpu.name}: raise engine.tensor_parallel_size {self.gpus}"
            )
        elif (fit := self.under_way(tokens)) < self.recipe.engine.max_num_seqs:
            found.append(
                f"a {gpu.name} keeps {fit} sequences of {tokens:,.0f} tokens under way, not engine.max_num_seqs "
                f"{self.recipe.engine.max_num_seqs}"
            )
        if size.counted_unquantised:
            found.append(f"quantisation {size.quantisation} is not known here: weights counted in bf16, an upper bound")
        return tuple(found)


def captured_bytes(size: TargetSize, boundaries: int, hidden_size: int) -> int:
    """Cache of one token's captured states in a harvest (vLLM 0.32, vllm/v1/core/kv_cache_utils.py).

    The states share blocks with the attention layers: a block is a page of 16 tokens for every layer of a group, of
    which the states of as many tokens are used as fit one page, at least one.
    """
    page = _BLOCK * size.layer_token_bytes
    group = size.layers - size.windowed_layers if size.windowed_layers else size.layers
    row = boundaries * hidden_size * 2
    return group * max(page, row) // max(1, page // row)
