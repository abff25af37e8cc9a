"""One pass under vLLM's model runner V2: states of sampled responses against transformers.

Not collected by its name: run with the plugin tests.gpu.interpreted_triton, as `test_model_runner_v2.py` does.
"""

from copy import copy

import pytest
import torch

from drafthead.config import load_recipe
from drafthead.data.shard import Shard, shard_path
from drafthead.engine.generate import GenerationRequest, capturing_engine
from drafthead.generation.harvest import capture
from drafthead.target.spec import captured_ids, load_target_spec

ENGINE = ("engine.max_model_len=256", "engine.max_num_batched_tokens=256", "engine.max_num_seqs=4")
RESPONSE = 10


def captured_decode_lengths(worker) -> set[int]:
    """Tokens of a request in the decode steps that vLLM would capture as full CUDA graphs; the steps have one."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    type(current_platform)._global_graph_pool = object()
    config, runner = copy(worker.vllm_config), worker.model_runner
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8]
    config.compilation_config.max_cudagraph_capture_size = 8
    manager = CudaGraphManager(config, runner.device, CUDAGraphMode.FULL_DECODE_ONLY, runner.decode_query_len)
    return {graph.uniform_token_count for graphs in manager._capture_descs.values() for graph in graphs}


def test_one_pass_stores_what_transformers_computes(tmp_path):
    from transformers import AutoModelForCausalLM

    recipe = load_recipe(overrides=list(ENGINE))
    spec = load_target_spec(recipe.target_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(12, 3000, (n,), generator=generator).tolist() for n in (9, 40, 3)]
    requests = [
        GenerationRequest(prompt, RESPONSE, 0.0, 0, ignore_stop=True, keep=str(i)) for i, prompt in enumerate(prompts)
    ]
    with capturing_engine(recipe, spec, seeded=True) as engine:
        worker = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        assert "vllm.v1.worker.gpu.model_runner" in {c.__module__ for c in type(worker.model_runner).__mro__}
        assert captured_decode_lengths(worker) == {1}
        responses = engine.generate(requests)
        texts = [prompt + response.token_ids for prompt, response in zip(prompts, responses, strict=True)]
        masks = [bytes(len(prompt)) + b"\1" * RESPONSE for prompt in prompts]
        engine.store([(shard_path(tmp_path, 0), list(zip("012", texts, masks, strict=True)))])
        engine.finish()
    model = AutoModelForCausalLM.from_pretrained(recipe.target_path, dtype=torch.float32).eval()
    shard, layer_ids = Shard(shard_path(tmp_path, 0)), recipe.target.aux_layer_ids
    boundaries = captured_ids(spec, layer_ids)
    for i, text in enumerate(texts):
        wanted = capture(model, text, boundaries)
        for j, boundary in enumerate(boundaries):
            if boundary in layer_ids:
                found, expected = shard[i].aux[boundary].float()[:-1], wanted[:-1, j]  # the last token was not read
                assert (found - expected).abs().max() == pytest.approx(0, abs=1e-4 * float(expected.abs().max()))
