"""The connector inside a real vLLM engine, against transformers: every boundary, chunked, with cached prefixes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from drafthead.config import load_recipe
from drafthead.data.shard import Shard, shard_path
from drafthead.engine.generate import CapturingEngine, GenerationRequest, capture_options
from drafthead.engine.shard_writer import ShardSlot
from drafthead.target.pieces import TargetHead, TargetSpec, load_target_spec
from tests.engine.slots import slots

pytestmark = pytest.mark.slow

BOUNDARIES = tuple(range(9))  # all boundaries of the tiny target, 0 (embeddings) to L = 8
RECIPE = load_recipe(overrides=[f"target.aux_layer_ids={list(BOUNDARIES)}", "target.dtype=float32"])
BUDGET = 96  # tokens per engine step: the longer texts need several


@dataclass
class Harvest:
    """What the engine left behind."""

    spec: TargetSpec
    texts: list[list[list[int]]]  # per shard
    shards: list[Shard]
    cached_tokens: int
    error_after: str


def make_texts() -> list[list[list[int]]]:
    """Two shards; the second begins with the first's long text, so 256 of its tokens come from the prefix cache."""
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(12, 3000, (length,), generator=generator).tolist()

    first = [text(5), text(300), text(128), text(1), text(97)]
    return [first, [first[1][:270] + text(40), text(33)]]


@pytest.fixture(scope="module")
def harvested(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    from drafthead.engine.offline import offline_engine

    directory = tmp_path_factory.mktemp("states")
    spec = load_target_spec(RECIPE.target_path)
    texts = make_texts()
    with offline_engine(RECIPE, max_num_batched_tokens=BUDGET, **capture_options(RECIPE, spec)) as llm:
        engine = CapturingEngine(llm)

        def harvest(places: list[ShardSlot], members: list[list[int]]) -> None:
            pairs = zip(places, members, strict=True)
            engine.generate([GenerationRequest(text, 1, 0.0, None, keep=slot.prompt_id) for slot, text in pairs])
            engine.store(places, members)

        for i, members in enumerate(texts):
            harvest(slots(directory, i, members)[::-1], members[::-1])
        engine.finish()
        cached = sum(m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
        (directory / "file").write_text("not a directory")
        harvest([ShardSlot(str(directory / "file" / "shard"), 0, 1, "lost", 1, 1)], [[20, 21, 22]])
        with pytest.raises(ValueError, match="could not be written") as caught:
            engine.finish()
    shards = [Shard(shard_path(directory, i)) for i in range(2)]
    return Harvest(spec, texts, shards, cached, str(caught.value))


@pytest.fixture(scope="module")
def reference(harvested: Harvest) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(harvested.spec.name, dtype=torch.float32).eval()


def test_every_boundary_equals_transformers(harvested: Harvest, reference: torch.nn.Module):
    from drafthead.generation.harvest import capture

    assert harvested.shards[0].ids == ["0-0", "0-1", "0-2", "0-3", "0-4"]
    assert harvested.shards[0][0].loss_mask.tolist() == [0, 0, 1, 1, 0]
    assert harvested.cached_tokens >= 256, "the prefix cache was not hit, so it was not tested"
    for shard, texts in zip(harvested.shards, harvested.texts, strict=True):
        assert len(shard) == len(texts)
        for i, text in enumerate(texts):
            sequence = shard[i]
            assert sequence.input_ids.tolist() == text
            assert sequence.aux[8].dtype == torch.float32
            expected = capture(reference, text, BOUNDARIES)  # (T, C, H)
            for boundary in BOUNDARIES:
                found, wanted = sequence.aux[boundary], expected[:, boundary]
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


@torch.no_grad()
def test_last_boundary_gives_the_targets_own_logits(harvested: Harvest, reference: torch.nn.Module):
    head = TargetHead.load(harvested.spec.name, dtype="float32")
    for i, text in enumerate(harvested.texts[0]):
        sequence = harvested.shards[0][i]
        logits = reference(torch.tensor([text])).logits[0]
        torch.testing.assert_close(head.logits(sequence.aux[8]), logits, rtol=1e-3, atol=1e-2)
        logits = logits[sequence.first_teacher_row :]
        torch.testing.assert_close(head.logits(sequence.last_hidden), logits, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(sequence.lse, logits.logsumexp(-1), rtol=1e-3, atol=1e-2)
        chosen = logits.gather(1, sequence.argmax[:, None].long())[:, 0]
        torch.testing.assert_close(chosen, logits.amax(-1), rtol=1e-3, atol=1e-2)


def test_an_error_of_the_writer_reaches_the_caller(harvested: Harvest):
    assert "file" in harvested.error_after


class Scheduled:
    """One request as the connector's scheduler side follows it: no engine, and vLLM's own records of each step."""

    def __init__(self, prompt_tokens: int, blocks: list[int]):
        from vllm.config import KVTransferConfig, VllmConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from drafthead.engine.connector import HiddenStatesConnector

        options = capture_options(RECIPE, load_target_spec(RECIPE.target_path))
        spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype=torch.float32)
        groups = [KVCacheGroupSpec([name], spec) for name in ("model.layers.0", "cache_only_layers.0")]
        self._connector = HiddenStatesConnector(
            VllmConfig(kv_transfer_config=KVTransferConfig(**options["kv_transfer_config"])),
            KVConnectorRole.SCHEDULER,
            KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups),
        )
        self._prompt, self._blocks = [1] * prompt_tokens, blocks

    def first(self, scheduled: int) -> Any:
        """Metadata of the step that begins with the request."""
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData

        params = SamplingParams(extra_args={"kv_transfer_params": {"keep": "a-1"}})
        new = NewRequestData("r", self._prompt, [], params, None, self._of_both_groups(self._blocks), 0, None)
        return self._metadata([new], CachedRequestData.make_empty(), scheduled, 0)

    def step(
        self, computed: int, scheduled: int, blocks: list[int] | None = None, resumed: bool = False, drafts: int = 0
    ) -> Any:
        """Metadata of a later step, which schedules so many tokens after those computed."""
        from vllm.v1.core.sched.output import CachedRequestData

        found = self._of_both_groups(blocks) if blocks else None
        cached = CachedRequestData(["r"], {"r"} if resumed else set(), [], {}, [found], [computed], [0])
        return self._metadata([], cached, scheduled, drafts)

    def _metadata(self, new: list, cached: Any, scheduled: int, drafts: int) -> Any:
        from vllm.v1.core.sched.output import SchedulerOutput

        proposed = {"r": [9] * drafts} if drafts else {}
        output = SchedulerOutput(new, cached, {"r": scheduled}, scheduled, proposed, {}, set(), [])
        return self._connector.build_connector_meta(output)

    @staticmethod
    def _of_both_groups(blocks: list[int]) -> tuple[list[int], list[int]]:
        """The target's own blocks come first; they hold no hidden states."""
        return [20 + block for block in blocks], blocks


def test_a_preempted_request_gives_each_row_once():
    request = Scheduled(5, [7])

    def rows(metadata: Any) -> list[tuple]:
        return [(r.keep, r.start, r.stop, r.block_ids) for r in metadata.rows]

    assert rows(request.first(5)) == [("a-1", 0, 5, [7])]
    assert rows(request.step(5, 1)) == [("a-1", 5, 6, [7])]
    assert rows(request.step(0, 4, [2], resumed=True)) == []  # preempted with 7 tokens: its rows are computed once more
    assert rows(request.step(4, 3, [3])) == [("a-1", 6, 7, [2, 3])]
    # The draft may still be rejected; then it was accepted.
    assert rows(request.step(7, 2, drafts=1)) == [("a-1", 7, 8, [2, 3])]
    assert rows(request.step(9, 1)) == [("a-1", 8, 10, [2, 3])]
