"""The connector inside a real vLLM engine, against transformers: every boundary, chunked, with cached prefixes."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from drafthead.config import load_recipe
from drafthead.data.store import Shard, shard_path
from drafthead.models.target import TargetHead, TargetSpec, load_target_spec
from drafthead.serving.capture.shard_writer import ShardSlot, ShardWriter

TAPS = tuple(range(9))  # all boundaries of the tiny target, 0 (embeddings) to L = 8
BUDGET = 96  # tokens per engine step: the longer texts need several


@dataclass
class Harvest:
    """What the engine left behind."""

    spec: TargetSpec
    texts: list[list[list[int]]]  # per shard
    shards: list[Shard]
    cached_tokens: list[int]
    error_after: str | None


def make_texts() -> list[list[list[int]]]:
    """Two shards; the second begins with the first's long text, so 256 of its tokens come from the prefix cache."""
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(12, 3000, (length,), generator=generator).tolist()

    first = [text(5), text(300), text(128), text(1), text(97)]
    return [first, [first[1][:270] + text(40), text(33)]]


def slots(directory: Path, shard: int, texts: list[list[int]]) -> list[ShardSlot]:
    return [
        ShardSlot(str(directory), shard, i, len(texts), f"{shard}-{i}", len(t) // 2, 2) for i, t in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def harvested(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    from drafthead.serving.engine import generate, import_vllm, offline_engine

    vllm = import_vllm()
    from drafthead.serving.capture.connector import harvest_engine_options

    directory = tmp_path_factory.mktemp("states")
    recipe = load_recipe()
    spec = load_target_spec(recipe.target_path)
    options = harvest_engine_options(spec, None, TAPS, "float32")

    def params(slot: ShardSlot) -> object:
        return vllm.SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_transfer_params": slot.to_params()})

    texts, cached = make_texts(), []
    with offline_engine(recipe, dtype="float32", max_num_batched_tokens=BUDGET, **options) as llm:
        for i, members in enumerate(texts):
            order = list(reversed(list(zip(slots(directory, i, members), members, strict=True))))
            outputs = generate(llm, [text for _, text in order], [params(slot) for slot, _ in order])
            cached += [output.num_cached_tokens for output in outputs]
        assert llm.collective_rpc("harvest_error", args=(True,)) == [None]
        (directory / "file").write_text("not a directory")
        lost = ShardSlot(str(directory / "file"), 0, 0, 1, "lost", 1, 1)
        generate(llm, [[20, 21, 22]], params(lost))
        (error,) = llm.collective_rpc("harvest_error", args=(True,))
    shards = [Shard(shard_path(directory, i)) for i in range(2)]
    return Harvest(spec, texts, shards, cached, error)


@pytest.fixture(scope="module")
def reference(harvested: Harvest) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(harvested.spec.name, dtype=torch.float32).eval()


@pytest.mark.slow
def test_every_boundary_equals_transformers(harvested: Harvest, reference: torch.nn.Module):
    from drafthead.generation.states.harvest_transformers import capture

    assert max(harvested.cached_tokens) >= 256, "the prefix cache was not hit, so it was not tested"
    for shard, texts in zip(harvested.shards, harvested.texts, strict=True):
        assert len(shard) == len(texts)
        for i, text in enumerate(texts):
            sequence = shard[i]
            assert sequence.input_ids.tolist() == text
            assert sequence.aux[8].dtype == torch.float32
            expected = capture(reference, text, TAPS)  # (T, C, H)
            for boundary in TAPS:
                found, wanted = sequence.aux[boundary], expected[:, boundary]
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


@pytest.mark.slow
@torch.no_grad()
def test_last_boundary_gives_the_targets_own_logits(harvested: Harvest, reference: torch.nn.Module):
    head = TargetHead.load(harvested.spec.name, dtype="float32")
    for i, text in enumerate(harvested.texts[0]):
        sequence = harvested.shards[0][i]
        logits = reference(torch.tensor([text])).logits[0]
        torch.testing.assert_close(head.logits(sequence.aux[8]), logits, rtol=1e-3, atol=1e-2)
        logits = logits[sequence.first_row :]  # from here on, rows that can carry loss
        torch.testing.assert_close(head.logits(sequence.last_hidden), logits, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(sequence.lse, logits.logsumexp(-1), rtol=1e-3, atol=1e-2)
        chosen = logits.gather(1, sequence.argmax[:, None].long())[:, 0]
        torch.testing.assert_close(chosen, logits.amax(-1), rtol=1e-3, atol=1e-2)


@pytest.mark.slow
def test_masks_and_ids_follow_the_slots(harvested: Harvest):
    assert harvested.shards[0].ids == ["0-0", "0-1", "0-2", "0-3", "0-4"]
    assert harvested.shards[0][0].loss_mask.tolist() == [0, 0, 1, 1, 0]


@pytest.mark.slow
def test_an_error_of_the_writer_reaches_the_caller(harvested: Harvest):
    assert harvested.error_after is not None
    assert "file" in harvested.error_after


@pytest.mark.slow
def test_a_preempted_prompt_is_taken_from_its_new_blocks(tmp_path: Path):
    from types import SimpleNamespace as Fake

    from drafthead.serving.capture.connector import HiddenStatesConnector

    connector = HiddenStatesConnector.__new__(HiddenStatesConnector)  # the scheduler's side needs no engine
    connector._group, connector._requests = 1, {}
    (slot,) = slots(tmp_path, 0, [[1] * 10])
    params = Fake(extra_args={"kv_transfer_params": slot.to_params()})
    new = Fake(
        req_id="r", sampling_params=params, prompt_token_ids=[1] * 10, block_ids=([9], [4]), num_computed_tokens=0
    )

    def step(computed: int, scheduled: int, blocks: object, resumed: bool) -> list[list[int]]:
        cached = Fake(
            req_ids=["r"],
            new_block_ids=[blocks],
            num_computed_tokens=[computed],
            resumed_req_ids={"r"} if resumed else set(),
        )
        output = Fake(scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={"r": scheduled})
        return [request.block_ids for request in connector.build_connector_meta(output).complete]

    none = Fake(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    first = Fake(scheduled_new_reqs=[new], scheduled_cached_reqs=none, num_scheduled_tokens={"r": 4})
    assert connector.build_connector_meta(first).complete == []
    assert step(4, 4, ([8], [5]), resumed=False) == []
    assert step(0, 6, ([7], [1, 2]), resumed=True) == []  # preempted at 8, begins again
    assert step(6, 4, ([3], [6]), resumed=False) == [[1, 2, 6]]
    assert step(10, 1, None, resumed=False) == []  # its answer is not captured


@pytest.mark.slow
def test_a_preempted_answer_gives_each_row_once():
    from types import SimpleNamespace as Fake

    from drafthead.serving.capture.connector import HiddenStatesConnector

    connector = HiddenStatesConnector.__new__(HiddenStatesConnector)
    connector._group, connector._requests = 0, {}
    params = Fake(extra_args={"kv_transfer_params": {"keep": "a-1"}})
    new = Fake(req_id="r", sampling_params=params, prompt_token_ids=[1] * 5, block_ids=([7],), num_computed_tokens=0)
    none = Fake(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())

    def step(computed: int, scheduled: int, blocks: object, resumed: bool = False, drafts: int = 0) -> list[tuple]:
        cached = Fake(
            req_ids=["r"],
            new_block_ids=[blocks],
            num_computed_tokens=[computed],
            resumed_req_ids={"r"} if resumed else set(),
        )
        output = Fake(
            scheduled_new_reqs=[] if computed or resumed else [new],
            scheduled_cached_reqs=cached if computed or resumed else none,
            num_scheduled_tokens={"r": scheduled},
            scheduled_spec_decode_tokens={"r": [9] * drafts} if drafts else {},
        )
        return [(r.start, r.stop, r.block_ids) for r in connector.build_connector_meta(output).rows]

    assert step(0, 5, None) == [(0, 5, [7])]
    assert step(5, 1, None) == [(5, 6, [7])]
    assert step(0, 4, ([2],), resumed=True) == []  # preempted with 7 tokens: its rows are computed once more
    assert step(4, 3, ([3],)) == [(6, 7, [2, 3])]
    assert step(7, 2, None, drafts=1) == [(7, 8, [2, 3])]  # nobody knows yet whether the draft will stand
    assert step(9, 1, None) == [(8, 10, [2, 3])]  # it did


def writer_of(num_layers: int, aside: bool = False) -> ShardWriter:
    from drafthead.models.target import TargetPieces

    pieces = TargetPieces(torch.eye(4), torch.ones(4), torch.eye(4))
    return ShardWriter((1,), num_layers, TargetHead(pieces, 1e-5, torch.float32), aside=aside)


def test_arrival_order_does_not_change_a_shard(tmp_path: Path):
    texts = [[1, 2, 3], [2, 3], [3, 1, 0, 2]]
    rows = [torch.randn(len(text), 2, 4) for text in texts]
    written = []
    for name, order in (("forward", [0, 1, 2]), ("backward", [2, 1, 0]), ("aside", [1, 0, 2])):
        writer, places = writer_of(2, aside=name == "aside"), slots(tmp_path / name, 0, texts)
        for i in order:
            writer.add(places[i], torch.tensor(texts[i]), rows[i])
        writer.finish()
        writer.close()
        written.append(shard_path(tmp_path / name, 0).read_bytes())
    assert written[0] == written[1] == written[2]


def test_what_fails_on_the_thread_reaches_the_caller_and_the_engines_threads_stay(tmp_path: Path):
    before = torch.get_num_threads()
    writer, (place,) = writer_of(2, aside=True), slots(tmp_path, 0, [[1, 2, 3]])
    writer.add(place, torch.tensor([1, 2, 3]), torch.randn(3, 2, 5))  # lm_head reads states of 4
    with pytest.raises(RuntimeError, match="size of tensor|must match"):
        writer.finish()
    writer.close()
    assert torch.get_num_threads() == before


def test_incomplete_and_wrong_rows_are_errors(tmp_path: Path):
    writer, places = writer_of(2), slots(tmp_path, 0, [[1, 2], [3, 1]])
    with pytest.raises(ValueError, match=r"shape \(3, 2, 4\), wanted \(2 tokens, 2 boundaries, H\)"):
        writer.add(places[0], torch.tensor([1, 2]), torch.randn(3, 2, 4))
    writer.add(places[0], torch.tensor([1, 2]), torch.randn(2, 2, 4))
    with pytest.raises(ValueError, match="arrived twice"):
        writer.add(places[0], torch.tensor([1, 2]), torch.randn(2, 2, 4))
    with pytest.raises(ValueError, match="only 1 of its sequences arrived"):
        writer.finish()
    writer.close()
