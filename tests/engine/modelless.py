"""vLLM's scheduler and our connector on both sides of it, without a model, whose computing is what takes time.

A step writes rows made up of token, position, boundary and column into the paged cache, at the blocks that the
scheduler gave the request; everything else is vLLM's and ours. With few blocks requests are preempted, and computed
again in others.

python -m tests.engine.modelless FOLDER SEED   fills two stores and a spool (tests/faults/test_capture_load.py)
"""

import random
import signal
import sys
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafthead.config import load_recipe
from drafthead.data.responses import Response
from drafthead.data.spool import Spool
from drafthead.engine.generate import capture_options
from drafthead.engine.offline import engine_arguments, import_vllm
from drafthead.generation.harvest import fill
from drafthead.generation.shards import ShardJob, cut_shards
from drafthead.processes import ends_with_parent
from drafthead.target.pieces import load_target_spec
from tests.engine.shards import writer_of

AT_ONCE, SHARDS = 200, 3  # requests in an engine, all those of a shard
BLOCK, HIDDEN, LAYERS = 16, 4, 2  # of the cache: tokens; of the made-up target
PLENTY, SCARCE = 4000, 450  # blocks: for all requests at once, for less than half of their tokens


def made_up(tokens: list[int], start: int) -> Tensor:
    """(n, C, H) rows of tokens from a position on, exact in any order and number."""
    token, position = torch.tensor(tokens)[:, None, None], torch.arange(start, start + len(tokens))[:, None, None]
    boundary, column = torch.arange(2)[None, :, None], torch.arange(HIDDEN)[None, None, :]
    return ((token * 31 + position * 17 + boundary * 101 + column * 7) % 251 / 16).float()


class Engine:
    """A worker of `drafthead.engine.running` that generates each text and keeps its states meanwhile."""

    def __init__(self, blocks: int):
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from drafthead.engine.connector import HiddenStatesConnector, WithoutDrafts

        recipe = load_recipe(overrides=["target.aux_layer_ids=[1]"])
        options = capture_options(recipe, load_target_spec(recipe.target_path))
        arguments = engine_arguments(
            recipe, **options, max_num_seqs=AT_ONCE, max_num_batched_tokens=1024, enable_prefix_caching=False
        )
        del arguments["use_tqdm_on_load"]  # of vLLM's LLM
        config = EngineArgs(**arguments).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HIDDEN, dtype=torch.float32)
        groups = [KVCacheGroupSpec([name], spec) for name in ("model.layers.0", "cache_only_layers.0")]
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self._scheduler = WithoutDrafts(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        self._connector = HiddenStatesConnector(config, KVConnectorRole.WORKER, cache)
        self._cache = torch.full((blocks, 2, BLOCK, HIDDEN), float("nan"))
        self._connector._cache, self._connector._writer = self._cache, writer_of(LAYERS)
        self.preempted = 0

    def make(self, job: ShardJob, bar: Any = None) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        texts = job.texts()
        ids = {name: tokens for name, tokens, _ in texts}
        for response in job.responses:
            params = SamplingParams(
                temperature=0.0, max_tokens=len(response.response_ids), ignore_eos=True,
                extra_args={"kv_transfer_params": {"keep": response.id}},
            )  # fmt: skip
            self._scheduler.add_request(Request(response.id, list(response.prompt_ids), params, None))
        while self._scheduler.has_unfinished_requests():
            self._step(ids)
        assert self._connector.store([(str(job.path), texts)]) is None
        if bar is not None:
            bar.update(job.size)

    def finish(self) -> None:
        assert self._connector.store([], finish=True) is None

    def _step(self, texts: dict[str, list[int]]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self._scheduler.schedule()
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self.preempted += len(scheduled.preempted_req_ids or ())
        sampled = []
        for name, count in scheduled.num_scheduled_tokens.items():
            request, start = self._scheduler.requests[name], computed[name]
            blocks = torch.tensor(self._scheduler.kv_cache_manager.get_block_ids(name)[1])
            places = torch.arange(start, start + count)
            rows = made_up(list(request.all_token_ids[start : start + count]), start)
            self._cache[blocks[places // BLOCK], :, places % BLOCK] = rows
            done = start + count
            sampled.append([texts[name][done]] if done == request.num_tokens else [])
        self._connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        self._connector.wait_for_save()
        self._connector.clear_connector_metadata()
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        self._scheduler.update_from_output(scheduled, output)


def make_jobs(directory: Path) -> list[ShardJob]:
    """Shards of texts of 4 to 80 tokens."""
    chooser, responses = random.Random(0), []
    for i in range(AT_ONCE * SHARDS):
        prompt, answer = chooser.randint(2, 40), chooser.randint(2, 40)
        ids = [chooser.randrange(4) for _ in range(prompt + answer)]
        responses.append(Response(f"text{i}", "chat", ids[:prompt], ids[prompt:], [], "", "stop", 0.0, "low", 0))
    return cut_shards(directory, [responses], AT_ONCE)


def fill_store(jobs: list[ShardJob], blocks: int) -> tuple[list[bytes], int]:
    """The shards' bytes, and how often a request was preempted."""
    engine = Engine(blocks)
    for job in jobs:
        engine.make(job)
    engine.finish()
    return [job.path.read_bytes() for job in jobs], engine.preempted


def use_up(spool: Spool, wanted: list[bytes], chooser: random.Random, seconds: float) -> None:
    """Train from a spool of two harvesters, one of which is killed now and then, until every shard was as wanted."""
    jobs, end_with_us = make_jobs(spool.directory), ends_with_parent()

    def work() -> None:
        if end_with_us:
            end_with_us()
        fill(Engine(SCARCE), spool, jobs)

    def harvester() -> BaseProcess:
        process = get_context("fork").Process(target=work)
        process.start()
        return process

    killed, harvesters, moment = 0, [harvester(), harvester()], time.monotonic() + chooser.uniform(0, seconds)
    for index in range(spool.total):
        while not spool.path(index).exists():
            if killed <= index // 10 and time.monotonic() > moment:
                victim = harvesters.pop(chooser.randrange(2))
                victim.kill()
                victim.join()
                killed += victim.exitcode == -signal.SIGKILL
                harvesters.append(harvester())
                moment = time.monotonic() + chooser.uniform(0, 10 * seconds)
            time.sleep(0.01)
        assert spool.path(index).read_bytes() == wanted[index]
        assert len(spool.present()) <= spool.capacity
        spool.release(index + 1)
    assert killed, "no harvester was killed"
    for process in harvesters:
        process.join()
        assert process.exitcode == 0


def main() -> None:
    torch.set_num_threads(1)  # a forked worker would wait for threads that its parent alone has
    folder, chooser = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    import_vllm()
    began = time.monotonic()
    wanted, preempted = fill_store(make_jobs(folder / "undisturbed"), PLENTY)
    seconds = (time.monotonic() - began) / SHARDS
    assert not preempted
    found, preempted = fill_store(make_jobs(folder / "store"), SCARCE)
    assert preempted
    assert found == wanted
    (folder / "spool").mkdir()
    use_up(Spool(folder / "spool", 2, SHARDS, 1), wanted, chooser, seconds)


if __name__ == "__main__":
    main()
