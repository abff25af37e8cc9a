"""The connector inside a real vLLM engine, against transformers: every boundary, in chunks, with cached prefixes."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from drafthead.config import load_recipe
from drafthead.data.shard import Shard, shard_path
from drafthead.engine.generate import CapturingEngine, GenerationRequest, capture_options
from drafthead.engine.shard_writer import SequenceSpec
from drafthead.target.pieces import TargetHead
from drafthead.target.spec import TargetSpec, load_target_spec
from tests.engine.shards import sequence_specs

pytestmark = pytest.mark.slow

BOUNDARIES = tuple(range(9))  # all boundaries of the tiny target, 0 (embeddings) to L = 8
RECIPE = load_recipe(overrides=[f"target.aux_layer_ids={list(BOUNDARIES)}", "engine.max_model_len=512"])
BUDGET = 96  # tokens per engine step: the longer texts need several


@dataclass
class Harvest:
    """What the engine left behind."""

    spec: TargetSpec
    texts: list[list[list[int]]]  # per shard
    shards: list[Shard]
    cached_tokens: int


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

        def harvest(path: Path, members: list[SequenceSpec]) -> None:
            engine.generate([GenerationRequest(s.token_ids, 1, 0.0, None, keep=s.id) for s in members[::-1]])
            engine.store([(path, members)])

        for i, members in enumerate(texts):
            harvest(shard_path(directory, i), sequence_specs(i, members))
        engine.finish()
        (cached,) = (m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
        (directory / "file").write_text("not a directory")
        harvest(directory / "file" / "shard", sequence_specs(0, [[20, 21, 22]]))
        with pytest.raises(ValueError, match="could not be written.*file"):
            engine.finish()
    shards = [Shard(shard_path(directory, i)) for i in range(2)]
    return Harvest(spec, texts, shards, cached)


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
                stored, of_family = sequence.aux[boundary], expected[:, boundary]
                torch.testing.assert_close(stored, of_family, rtol=1e-3, atol=1e-3 * of_family.abs().max().item())


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
