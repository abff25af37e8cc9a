"""Memory on one GPU: of an engine that runs the target, and of a rank that trains a head.

Both are added up from shapes, not measured. Left out: an engine's activations and CUDA graphs (a few GiB), and in
training the allocator's slack, CUDA's context and NCCL's buffers, so leave a tenth free.

The target is built from its config.json on meta tensors: nothing is allocated and no weights need be there.

An engine that captures hidden states starts only where its cache can hold one whole request. Captured states lie in the
cache's blocks, in a group of their own. A block is one page for each layer of a group, and the pages of all groups have
one size. Where all layers attend to everything, states and keys share a block of 16 tokens and nothing is lost; where
layers with a window are a second group, a page of states holds few tokens, at gpt-oss one, and costs as much as a page
of every layer: 576 KiB a token. This is vLLM 0.32's arithmetic (vllm/v1/core/kv_cache_utils.py), which a test compares
it with. Tensor parallelism splits weights, keys and values, and repeats captured states.
"""

import math

import torch

from drafthead.config import Recipe
from drafthead.config.train import TrainConfig
from drafthead.data.packing import window_tokens
from drafthead.drafters.base import DraftShape, num_parameters
from drafthead.drafters.registry import drafter_of
from drafthead.engine.generate import BATCHED_TOKENS, reserved_bytes
from drafthead.engine.offline import cache_group_size, import_vllm
from drafthead.files import reading_external
from drafthead.losses.fused import CHUNK_ROWS
from drafthead.planning import size_text
from drafthead.target.files import OTHER
from drafthead.target.spec import captured_ids, model_config, recipe_spec
from drafthead.training.accelerator import bucket_elements

_FLOAT32 = 4
_MXFP4_BYTES = 17 / 32  # 32 values of 4 bits share a scale of 8
_CACHE_BYTES = 2  # of a key, value or captured state: engines cache in bf16 unless told otherwise
_BLOCK = 16  # tokens
# Activations of a full batch, CUDA graphs, context: estimated, not measured, at the lower end.
_BESIDES = 2 * 2**30


class EngineMemory:
    """One engine: weights, and the cache of the sequences under way.

    vLLM itself takes engine.gpu_memory_utilization of a GPU in any case, and keeps fewer sequences under way where the
    cache is short.

    Attributes:
        gpus: number of GPUs of the engine; bytes are those of one.
        weight_bytes: bytes of the target's weights; counted as bf16 where the quantisation is unknown.
        known: whether the quantisation is known.
        request_bytes: cache of a harvest's longest request, engine.max_model_len, with its captured states.
        reserved_bytes: bytes that capturing takes beside the engine.
    """

    def __init__(self, recipe: Recipe):
        """Read the target's config.json.

        Raises:
            FileNotFoundError: there is no config.json here, and none can be downloaded; the message has the command.
            ForeignFileError: transformers has no causal language model for it.
        """
        from transformers import AutoModelForCausalLM

        path, trusted = recipe.target_path, recipe.target.trust_remote_code
        config = model_config(recipe)
        quantisation = (getattr(config, "quantization_config", None) or {}).get("quant_method")
        config = config.get_text_config()
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with reading_external(f"the shapes of target {path}", OTHER), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=trusted)
        weights = sum(p.numel() * _width(name, p.dim(), quantisation) for name, p in model.named_parameters())
        engine, self.known = recipe.engine, quantisation in (None, "mxfp4", "fp8")
        self.gpus, self.weight_bytes = engine.tensor_parallel_size, int(weights) // engine.tensor_parallel_size
        self._layers = config.num_hidden_layers
        self._windowed = sum(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or [])
        self._window = getattr(config, "sliding_window", None) or 0
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = max(config.num_key_value_heads // self.gpus, 1)  # fewer than GPUs are repeated
        self._layer_token_bytes = 2 * heads * head_dim * _CACHE_BYTES  # keys and values
        if rank := getattr(config, "kv_lora_rank", None):  # multi-head latent attention, whole on every GPU
            self._layer_token_bytes = (rank + config.qk_rope_head_dim) * _CACHE_BYTES
        spec = recipe_spec(recipe)
        self.reserved_bytes = reserved_bytes(recipe, spec)
        self.request_bytes = request_bytes(
            self._layers, self._windowed, self._window,
            token_bytes=self._layer_token_bytes,
            states_bytes=len(captured_ids(spec, recipe.target.aux_layer_ids)) * spec.hidden_size * _CACHE_BYTES,
            length=engine.max_model_len,
            batched=engine.max_num_batched_tokens or BATCHED_TOKENS,
        )  # fmt: skip

    def cache_bytes(self, tokens: float) -> int:
        """Of one sequence, on each GPU of the engine; a layer with a window keeps no more than that."""
        cached = (self._layers - self._windowed) * tokens + self._windowed * min(tokens, self._window)
        return int(cached * self._layer_token_bytes)


def _width(name: str, dimensions: int, method: str | None) -> float:
    """Bytes per weight: MXFP4 packs experts; fp8 packs matrices but embeddings and lm_head; the rest is bf16."""
    if method == "mxfp4" and ".experts." in name and not name.endswith("bias"):
        return _MXFP4_BYTES
    if method == "fp8" and dimensions > 1 and "embed" not in name and "lm_head" not in name:
        return 1
    return 2


def request_bytes(
    layers: int, windowed: int, window: int, token_bytes: int, states_bytes: int, length: int, batched: int
) -> int:
    """Cache that one request of `length` tokens takes with its captured states.

    Args:
        layers, windowed: number of the target's layers, and of those that attend to a window.
        window: tokens of the window.
        token_bytes: keys and values of one token in one layer.
        states_bytes: captured states of one token.
        length: tokens of the request.
        batched: tokens of a step; a layer with a window keeps those and the window.
    """
    if not windowed:
        return math.ceil(length / _BLOCK) * _BLOCK * (layers * token_bytes + states_bytes)
    full = layers - windowed
    size = cache_group_size(windowed, full)
    block = math.ceil(max(_BLOCK * token_bytes, states_bytes) / (_BLOCK * token_bytes)) * _BLOCK
    page = block * token_bytes
    in_window = min(window - 1 + batched, length)
    blocks = math.ceil(full / size) * math.ceil(length / block)
    blocks += math.ceil(windowed / size) * (math.ceil(in_window / block) + 1)
    blocks += math.ceil(length / (page // states_bytes))
    return blocks * size * page


def refusal(recipe: Recipe, gpu_memory_gib: float) -> str | None:
    """Why a harvest would not start on such GPUs, and what to change; None where it should."""
    engine = recipe.engine
    usable = int(gpu_memory_gib * 2**30 * engine.gpu_memory_utilization)
    memory = EngineMemory(recipe)
    weights, needed, besides = memory.weight_bytes, memory.request_bytes, _BESIDES + memory.reserved_bytes
    if weights + needed + besides <= usable or not memory.known:
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


def training_memory(
    shape: DraftShape, config: TrainConfig, ranks: int, device: str = "cuda", longest: int = 0
) -> dict[str, int]:
    """Bytes on one rank, by part; a test holds their sum against the memory that one step takes on a CPU.

    Args:
        shape: shape of the head.
        config: train section of the recipe.
        ranks: number of ranks that share the run.
        device: "cuda" or "cpu", whose chunks differ.
        longest: tokens of a document; one beyond train.tokens_per_batch is read in windows that exceed it, too.

    Returns:
        weights (in the compute type, with the float32 masters), gradients, optimizer (moments),
        buckets (of gradients that are filled and sent, on CUDA), target (embeddings, head rows and norm), batch (aux
        and last states of one micro batch and of the next one),
        activations (kept for the backward) and loss (logits of a chunk, and the head's gradient).
    """
    width = 2 if config.precision == "bf16" else _FLOAT32
    parameters, stage = num_parameters(shape), config.zero_stage
    share = parameters // ranks
    H, V, D, tokens = shape.hidden_size, shape.vocab_size, shape.head.draft_vocab_size, config.tokens_per_batch
    masters = 0 if stage == 0 else _FLOAT32 * share
    read = max(tokens, min(longest, window_tokens(tokens, tokens // 2)))
    rows = CHUNK_ROWS[device]
    teacher_rows = rows // shape.head.num_positions
    return {
        "weights": width * (share if stage == 3 else parameters) + masters,
        "gradients": width * (share if stage >= 2 else parameters),
        "optimizer": 2 * _FLOAT32 * (parameters if stage == 0 else share),
        "buckets": 2 * width * bucket_elements(parameters) if device == "cuda" and stage else 0,
        "target": width * (V + D) * H,
        "batch": 2 * width * read * (shape.num_aux_layers + 1) * H,
        "activations": width * tokens * _kept_per_row(shape, config, width),
        "loss": rows * D * (_FLOAT32 + (0 if width == _FLOAT32 else width)) + teacher_rows * D * _FLOAT32
        + D * H * _FLOAT32,
    }  # fmt: skip


def _kept_per_row(shape: DraftShape, config: TrainConfig, width: int) -> int:
    """Elements of `width` bytes that the unroll keeps for one row over all draft positions."""
    head, H = shape.head, shape.hidden_size
    queries, keys = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
    carried = 2 * keys + H  # keys, values and the state after the block: needed by later steps
    inside = 2 * queries + 2 * head.intermediate_size + H  # query, attention's output, gate, up, the state between
    per_layer = carried + (0 if config.gradient_checkpointing else inside)
    results = 3 * H  # a step's normed state, its place in the stack, and its gradient
    if drafter_of(head).learns_features:
        results += H * _FLOAT32 // width  # the difference that is squared
    reading = queries + 2 * keys + 2 * H  # what embeddings give to q, k and v, and what that was made from
    once = inside if config.gradient_checkpointing else 0
    return drafter_of(head).num_slots * (head.num_layers * per_layer + results) + reading + once
