"""Whether an engine that captures hidden states starts: vLLM refuses when its cache cannot hold one whole request.

Captured states live in the cache's blocks, in a group of their own. A block is one page for each layer of a group, and
the pages of all groups have one size. Where all layers attend to everything, states and keys share a block of 16 tokens
and nothing is lost; where layers with a window are a second group, a page of states holds few tokens, at gpt-oss one,
and costs as much as a page of every layer: 576 KiB a token. This is vLLM 0.32's arithmetic
(vllm/v1/core/kv_cache_utils.py), which a test compares it with.

Bytes are those of one GPU: tensor parallelism splits weights, keys and values, and repeats captured states.
"""

import math

from drafthead.config import Recipe
from drafthead.drafters.registry import drafter_of
from drafthead.engine.generate import BATCHED_TOKENS, reserved_bytes
from drafthead.engine.offline import cache_group_size, import_vllm
from drafthead.planning import size_text
from drafthead.planning.memory import EngineMemory
from drafthead.target.pieces import load_target_spec, model_config

_BLOCK = 16  # tokens
_WIDTH = 2  # bytes of a captured state, a key or a value
# Activations of a full batch, CUDA graphs, context: estimated, not measured, at the lower end.
_BESIDES = 2 * 2**30


def request_bytes(
    layers: int,
    windowed: int,
    window: int,
    token_bytes: int,
    states_bytes: int,
    length: int,
    batched: int = BATCHED_TOKENS,
) -> int:
    """Cache that one request of `length` tokens takes with its captured states.

    Args:
        layers, windowed: of the target, and those of them that attend to a window.
        window: its tokens.
        token_bytes: keys and values of one token in one layer.
        states_bytes: captured states of one token.
        length: tokens.
        batched: tokens of a step; a layer with a window keeps those and the window.
    """
    if not windowed:
        return math.ceil(length / _BLOCK) * _BLOCK * (layers * token_bytes + states_bytes)
    full = layers - windowed
    size = cache_group_size(windowed, full)
    block = math.ceil(max(_BLOCK * token_bytes, states_bytes) / (_BLOCK * token_bytes)) * _BLOCK
    page = block * token_bytes
    kept = min(window - 1 + batched, length)
    blocks = math.ceil(full / size) * math.ceil(length / block)
    blocks += math.ceil(windowed / size) * (math.ceil(kept / block) + 1)
    blocks += math.ceil(length / (page // states_bytes))
    return blocks * size * page


def recipe_request_bytes(recipe: Recipe) -> int:
    """That of a harvest's longest request, engine.max_model_len, on one of the engine's GPUs.

    Raises:
        FileNotFoundError: the target's config.json is missing.
    """
    target, engine = recipe.target, recipe.engine
    config = model_config(recipe).get_text_config()
    spec = load_target_spec(recipe.target_path, target.revision)
    boundaries = drafter_of(recipe.head).needs(spec, target.aux_layer_ids)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = max(config.num_key_value_heads // engine.tensor_parallel_size, 1)
    return request_bytes(
        layers=config.num_hidden_layers,
        windowed=sum(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []),
        window=getattr(config, "sliding_window", None) or 0,
        token_bytes=2 * heads * head_dim * _WIDTH,
        states_bytes=len(boundaries) * spec.hidden_size * _WIDTH,
        length=engine.max_model_len,
        batched=engine.max_num_batched_tokens or BATCHED_TOKENS,
    )


def refusal(recipe: Recipe, gpu_memory_gib: float) -> str | None:
    """Why a harvest would not start on such GPUs, and what to change; None where it should."""
    engine = recipe.engine
    usable = int(gpu_memory_gib * 2**30 * engine.gpu_memory_utilization)
    weights, needed = EngineMemory(recipe).weight_bytes, recipe_request_bytes(recipe)
    besides = _BESIDES + reserved_bytes(recipe, load_target_spec(recipe.target_path, recipe.target.revision))
    if weights + needed + besides <= usable:
        return None
    return (
        f"a harvest does not start: weights of {size_text(weights)}, {size_text(needed)} of cache for one request of "
        f"engine.max_model_len {engine.max_model_len} with its states and about {size_text(besides)} besides do not "
        f"fit the {size_text(usable)} that the engine takes of a GPU. Set engine.tensor_parallel_size above "
        f"{engine.tensor_parallel_size} (for the harvest alone, on its command line), use GPUs with more memory, or "
        "lower engine.max_model_len"
    )


def check_fits(recipe: Recipe) -> None:
    """Refuse before an engine has loaded its weights; does nothing without a CUDA GPU.

    Raises:
        ValueError: as `refusal` says, for this machine's GPUs.
    """
    if recipe.states.backend != "vllm":
        return
    import_vllm()
    from vllm.platforms import current_platform  # asks NVML: CUDA is not initialised before the engine forks

    if current_platform.is_cuda() and (why := refusal(recipe, current_platform.get_device_total_memory() / 2**30)):
        raise ValueError(why)
