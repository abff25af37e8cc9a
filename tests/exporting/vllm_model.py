"""vLLM's own EAGLE-3 model class, run without an engine, and beside it the logits that ours gives.

One engine configuration is made with the first head; every further head only replaces the draft's config, as vLLM
parses it, before the class is built and fed through vLLM's own weight loader. The paged attention kernel needs an
engine's KV cache, so it alone is replaced, by PyTorch's causal attention over the same q, k and v: projections, rotary
embedding, norms, residuals, fc, logits and the vocabulary map are vLLM's.

Shapes: T tokens, N aux layers, H hidden, V target vocabulary.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafthead.config import Recipe
from drafthead.drafters.base import DraftShape, frozen_copy
from drafthead.drafters.batch import tail_layout
from drafthead.drafters.eagle3.drafter import Eagle3
from drafthead.engine.offline import engine_arguments, import_vllm

TOKENS = 6


class VllmDraft:
    """Builds vLLM's draft model for one exported directory after another."""

    def __init__(self, recipe: Recipe, first_head: Path):
        from vllm.engine.arg_utils import EngineArgs

        speculative = Eagle3.vllm.speculative_config(first_head, 3)
        arguments = engine_arguments(recipe, dtype="float32", speculative_config=speculative)
        arguments.pop("use_tqdm_on_load")
        self.config: Any = EngineArgs(**arguments).create_engine_config()

    def load(self, head: Path, method: str = "eagle3", class_of: str = "llama_eagle3.Eagle3LlamaForCausalLM") -> Any:
        """The model with the head's weights and the target's embedding left at zero.

        Args:
            head: an exported directory, in either format.
            method: of --speculative-config.
            class_of: module and name of the class that vLLM takes for it.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.transformers_utils.config import get_config
        from vllm.transformers_utils.configs.eagle import EAGLEConfig
        from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
        from vllm.utils.torch_utils import set_default_torch_dtype

        parsed = get_config(str(head), trust_remote_code=False)
        if not isinstance(parsed, SpeculatorsConfig):
            parsed = EAGLEConfig(parsed, method=method, model_type="eagle") if method != "dspark" else parsed
        self.config.speculative_config.draft_model_config.hf_config = parsed
        self.config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(self.config), set_default_torch_dtype(torch.float32):
            module, _, name = class_of.partition(".")
            built = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
            model = built(vllm_config=self.config)
            model.load_weights(iter(load_file(head / "model.safetensors").items()))
            process_weights_after_loading(model, self.config.model_config, torch.device("cpu"))
        for layer in model.model.layers:
            attention = layer.self_attn.attn
            attention.forward = _plain_attention(attention.num_heads, attention.num_kv_heads, attention.head_size)
        return model


def _plain_attention(heads: int, groups: int, size: int) -> Any:
    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (n, size)).transpose(0, 1) for t, n in ((query, heads), (key, groups), (value, groups))
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1)

    return forward


@torch.no_grad()
def two_steps(draft: VllmDraft, model: Any, aux: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Logits as the proposer makes them: over the verified tokens, then from the state that comes out.

    Args:
        draft: that built the model.
        model: from `load`.
        aux: (T, N * H).
        embeddings: (T + 1, H): entry t is read at position t.

    Returns:
        (T, V) of the first step at every position, (V,) of the second after the last one.
    """
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    tokens = aux.shape[0]
    with set_current_vllm_config(draft.config), set_forward_context(None, draft.config):
        features = model.combine_hidden_states(aux)
        states, recycled = model(None, torch.arange(tokens), features, inputs_embeds=embeddings[:tokens])
        longer = torch.cat([features, recycled[-1:]])
        after, _ = model(None, torch.arange(tokens + 1), longer, inputs_embeds=embeddings)
        return model.compute_logits(states), model.compute_logits(after[-1:])[0]


def our_logits(shape: DraftShape, weights: dict[str, Tensor], aux: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """(T, V) of the first step and (V,) of the second from the last position, minus infinity where no draft id is."""
    model = frozen_copy(shape, weights, torch.device("cpu"), torch.float32)
    # vLLM's rows hold the embedding they read: one more token in front, and states of two more that nobody sees.
    tokens, aux = torch.cat([embeddings[:1], embeddings]), torch.nn.functional.pad(aux, (0, 0, 0, 2))
    unrolled = model.unroll(aux, tokens, torch.arange(TOKENS + 2), tail_layout([TOKENS + 2], [0]), 2)
    states = torch.stack(unrolled)[:, :TOKENS]
    logits = torch.full((2, TOKENS, shape.vocab_size), float("-inf"))
    logits[:, :, weights["t2d"].nonzero()[:, 0]] = model.lm_head(states)
    return logits[0], logits[1, -1]


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of one, as vLLM's parallel layers expect, and none afterwards."""
    import_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel()
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()
