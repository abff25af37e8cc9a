"""vLLM's offline engine as this project starts it: one call, one clean shutdown, several in a row.

Below it stands the repair of vLLM's CPU build that every engine and server started here needs.

On CPU the engine runs inside this process. vLLM's default puts it into a child that starts a grandchild, each
importing everything again: measured on two cores, 22 s to start and 5 s to stop, against 2 s and 0 s. Given up:
tensor parallelism on CPU, and isolation from a crash. One core is left free: OpenMP threads spin while they wait
for each other, and when something else wanted their core, two threads on two cores fell from 5,500 to 100
tokens/s, where one made 4,100. On CUDA vLLM's defaults stay: processes of their own, which return all device
memory when they end, and CUDA graphs.
"""

import importlib
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from drafthead.artifacts import read_json
from drafthead.config import Recipe
from drafthead.processes import children_end_with_us
from drafthead.target.files import local_files, pinned_revision

if TYPE_CHECKING:
    from vllm import LLM

# Warnings of the CPU build are about the build (no Triton, no tcmalloc), twenty lines per engine.
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def keep_engines_in_this_process() -> None:
    """From here on engines run in this process, on CUDA too: with one of its own, killing it leaves no orphan."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def import_vllm() -> Any:
    """The vllm module.

    Raises:
        ValueError: it is not installed, or its compiled part does not load.
    """
    for name, value in _QUIET.items():  # unless the user set them
        os.environ.setdefault(name, value)
    # Its import logs before it reads the level, and its Triton stand-in touches deprecated names of torch.
    if "vllm" not in sys.modules:
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    try:
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils")
        import vllm
    except ImportError as error:
        raise ValueError(
            f"vLLM cannot be imported ({error}). On a GPU machine: pip install -e '.[gpu]'; on CPU: make install "
            "(the pinned requirements/cpu.txt). Harvesting also runs without it: states.backend=transformers"
        ) from error
    return vllm


def target_arguments(recipe: Recipe, cpu: bool, head: str | None) -> dict[str, Any]:
    """How every engine runs the recipe's target, by vLLM's keyword arguments; a server's flags have the same names.

    Args:
        recipe: recipe; its target and engine sections are read.
        cpu: whether the engine runs on a CPU.
        head: directory or hub id of the draft model, if there is one.
    """
    engine, target = recipe.engine, recipe.target
    arguments = {
        "model": recipe.target_path,
        "revision": pinned_revision(recipe.target_path, target.revision),
        "trust_remote_code": target.trust_remote_code,
        "dtype": target.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "tensor_parallel_size": engine.tensor_parallel_size if engine.tensor_parallel_size > 1 else None,
        "gpu_memory_utilization": None if cpu else engine.gpu_memory_utilization,
        # Compiling costs a minute per engine and saves less on models small enough for a CPU.
        "enforce_eager": cpu,
        "disable_hybrid_kv_cache_manager": needs_one_cache_group(recipe, head),
    }
    return {key: value for key, value in arguments.items() if value}


def engine_arguments(recipe: Recipe, *, seeded: bool = False, **more: Any) -> dict[str, Any]:
    """The keyword arguments of vLLM's engine that follow from the recipe.

    Args:
        recipe: recipe; its target and engine sections are read.
        seeded: requests will carry seeds of their own (on CPU that excludes chunked prefill).
        more: vLLM's own arguments, instead of the recipe's or beside them; None leaves one out.
    """
    head = (more.get("speculative_config") or more).get("model")  # a head that names its target is the model
    arguments = target_arguments(recipe, on_cpu(), head)
    arguments |= {"enable_prefix_caching": True, "disable_log_stats": False, "use_tqdm_on_load": False, "seed": 0}
    if on_cpu():
        arguments["kv_cache_memory_bytes"] = cpu_cache_gib() << 30
    arguments |= {key: value for key, value in more.items() if value is not None}
    if seeded and on_cpu():
        # vLLM 0.32 rewinds the generator of a seeded request after a partial prefill, which only CUDA's
        # generators can do: "CPU Generator does not use offset".
        batched = max(arguments.get("max_num_batched_tokens", 4096), recipe.engine.max_model_len)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": batched}
    return arguments


def needs_one_cache_group(recipe: Recipe, head: str | None) -> bool:
    """Whether vLLM serves this head with one group of KV cache for all layers only (disable_hybrid_kv_cache_manager).

    It wants all layers of a draft in one group. Where layers differ in heads or window, layers of each kind are cut
    into groups of one size; a draft's may be of a kind of the target's. In one group, layers with a window keep whole
    sequences too. Of a config.json that is not here nothing is known.
    """
    try:
        target, draft = (
            read_json(local_files(str(path), revision, ("config.json",)) / "config.json")
            for path, revision in ((recipe.target_path, recipe.target.revision), (head, None))
        )
    except (OSError, ValueError):
        return False
    target, draft = target.get("text_config", target), draft.get("transformer_layer_config", draft)
    if any("num_attention_heads" not in config for config in (target, draft)):  # heads of Medusa attend to nothing
        return False

    def kinds(config: Mapping[str, Any]) -> Counter[tuple[int, int, int]]:
        """Layers by heads on one GPU, their size, and window."""
        queries = config["num_attention_heads"]
        kv_heads = max((config.get("num_key_value_heads") or queries) // recipe.engine.tensor_parallel_size, 1)
        size = config.get("head_dim") or config["hidden_size"] // queries
        layers = config.get("layer_types") or ["full_attention"] * config.get("num_hidden_layers", 0)
        window = config.get("sliding_window") or 0
        return Counter((kv_heads, size, window if kind == "sliding_attention" else 0) for kind in layers)

    drafts = kinds(draft)
    together = kinds(target) + drafts
    size = cache_group_size(*together.values())
    return any(layers > 1 and size < together[kind] for kind, layers in drafts.items())


def cache_group_size(*layers: int) -> int:
    """Layers of a group of vLLM's KV cache, from how many the model has of each kind of attention.

    vLLM 0.32, vllm/v1/core/kv_cache_utils.py, `_get_kv_cache_groups_uniform_page_size`.
    """
    return max(layers) if max(layers) < 1.5 * min(layers) else min(layers)


@contextmanager
def offline_engine(recipe: Recipe, *, seeded: bool = False, **more: Any) -> Iterator["LLM"]:
    """A running `vllm.LLM` on the recipe's target, shut down and freed when the block ends.

    Args:
        recipe, seeded, more: arguments of `engine_arguments`; with `speculative_config` the engine drafts.

    Raises:
        ValueError: vLLM is not installed, or the recipe has tensor parallelism on CPU.
    """
    vllm = import_vllm()
    if on_cpu() and recipe.engine.tensor_parallel_size > 1:
        raise ValueError(
            f"engine.tensor_parallel_size {recipe.engine.tensor_parallel_size} needs GPUs: "
            "on CPU the engine runs in one process; set it to 1"
        )
    arguments = engine_arguments(recipe, seeded=seeded, **more)
    # What an engine inside this process changes for everyone else in it, and is put back.
    functions = (torch.set_num_threads, torch.accelerator.synchronize, torch.accelerator.empty_cache)
    threads, rng = torch.get_num_threads(), torch.get_rng_state()
    if on_cpu():
        repair_cpu_build()
        keep_engines_in_this_process()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, threads - 1))
    try:
        with children_end_with_us():
            llm = vllm.LLM(**arguments)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()  # frees weights, caches and process groups, in this process too
    finally:
        torch.set_num_threads, torch.accelerator.synchronize, torch.accelerator.empty_cache = functions
        torch.set_num_threads(threads)
        torch.set_rng_state(rng)


def on_cpu() -> bool:
    """Whether the installed vLLM runs on CPU."""
    import_vllm()
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def cpu_cache_gib() -> int:
    """GiB of KV cache of an engine on CPU: vLLM's own VLLM_CPU_KVCACHE_SPACE, or 1 where it is not set."""
    return int(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1)


def repair_cpu_build() -> None:
    """Replace two kernels of vLLM 0.32's CPU build, before an engine starts; does nothing a second time.

    Its `expand` converts what it writes to int64 and discards the converted copy, so the temperature of every draft
    position is whatever lay in memory: speculative sampling at T > 0 is wrong. T = 0 does not take that path.

    Its `rms_norm` takes the first row of a weight that has one for each layer: of a draft model whose context keys are
    normed for all layers at once, every layer but the first reads keys of the wrong scale.
    """
    kernels: Any = importlib.import_module("vllm.utils.cpu_triton_utils")
    kernels._expand_kernel_impl = expand
    ops: Any = importlib.import_module("vllm._custom_ops")
    if ops.rms_norm.__module__ != __name__:
        ops.rms_norm = partial(rms_norm_of_layers, ops.rms_norm)
        ops.rms_norm.__module__ = __name__


def rms_norm_of_layers(
    kernel: Callable[..., None], out: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """The norm of states (..., H) with a weight (H,), or of (L, ..., H) with one for each layer (L, H), into `out`."""
    parts = zip(out, states, weight, strict=True) if weight.dim() == 2 else [(out, states, weight)]
    for part in parts:
        kernel(*part, epsilon)


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value for each of its tokens: [a, b] with ends [2, 5] gives [a, a, b, b, b].

    Args:
        output: (tokens,) tensor that is written.
        input_val: (requests,) values.
        cu_num_tokens: (requests,) where the tokens of each request end.
        replace_from, replace_to: a value that is replaced on the way.
        MAX_NUM_TOKENS: part of the kernel's signature; unused.
    """
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(torch.repeat_interleave(values, counts))
