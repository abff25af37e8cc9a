"""A drafter of another kind, in forty lines outside the library: the same packing, loss, replay and trainer module."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from drafthead.data.packing import pack, whole
from drafthead.data.shard import shard_path, write_shard
from drafthead.data.store import StateStore
from drafthead.drafters import registry
from drafthead.drafters.base import Drafter, DraftModule, DraftShape, num_parameters
from drafthead.drafters.config import HeadConfig
from drafthead.losses.fused import HeadRows
from drafthead.training.trainer import LossModule, replayed
from tests.data.sequences import sequence
from tests.drafters.small_draft import small_model
from tests.training.toy import frozen


class ParallelHead(HeadConfig):
    type: str = "parallel"

    @property
    def num_positions(self) -> int:
        return 2


class ParallelModule(DraftModule):
    """Every position is a matrix of its own on the root's fused state, all of them in one pass."""

    def __init__(self, shape: DraftShape):
        super().__init__(shape)
        size = shape.hidden_size
        self.fc = nn.Linear(shape.num_aux_layers * size, size, bias=False)
        self.positions = nn.ModuleList(nn.Linear(size, size) for _ in range(shape.head.num_positions))
        self.lm_head = nn.Linear(size, shape.head.draft_vocab_size, bias=False)

    def head_rows(self, batch, embeddings, num_positions) -> HeadRows:
        fused = self.fc(batch.aux)[batch.layout.rows]
        states = torch.stack([layer(fused) for layer in self.positions[:num_positions]])
        return HeadRows(states.flatten(0, 1), batch.teachers(num_positions), (len(fused),) * num_positions)


class Parallel(Drafter):
    lookahead = 3
    MODULE = ParallelModule
    vllm = None

    def first_row(self, loss_mask: Tensor) -> int:
        return max(int(loss_mask.nonzero()[0]) - 1, 0)

    def loss_rows(self, loss_mask: Tensor) -> Tensor:
        generated = torch.cat([loss_mask.bool(), torch.zeros(3, dtype=torch.bool)])
        one = generated[2 : len(loss_mask) + 2]
        return torch.stack([one, one & generated[3 : len(loss_mask) + 3]])


@pytest.fixture
def drafter(monkeypatch) -> Parallel:
    monkeypatch.setitem(registry._DRAFTERS, "parallel", (__name__, "Parallel"))
    sizes = {"intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    return registry.drafter_of(ParallelHead(draft_vocab_size=11, **sizes))


def test_it_learns_from_the_same_store_and_is_replayed(drafter, tmp_path):
    document = sequence("a", 40, layers=(0, 1, 2), hidden=8)
    document.loss_mask[:6] = 0
    write_shard(shard_path(tmp_path, 0), [document], num_target_layers=3)
    store, target = StateStore(tmp_path), frozen(small_model())
    batch = pack(store, [whole(0, document.loss_mask, drafter)], drafter).to(torch.device("cpu"), torch.float64)
    assert batch.layout.rows[0] == 5
    torch.manual_seed(0)
    model = drafter.MODULE(replace(small_model().shape, head=drafter.head)).double()
    assert num_parameters(model.shape) == sum(p.numel() for p in model.parameters())
    scale = drafter.position_weights().float() / batch.scored.sum(1)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05), []
    for _ in range(40):
        scored = LossModule(model)(batch, target, scale)
        optimizer.zero_grad()
        scored.loss.backward()
        optimizer.step()
        losses.append(float(scored.loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    drafts = drafter.draft(model, batch, target.embeddings, target.target_ids, 2)
    assert drafts.shape == (2, 35)
    assert replayed(drafts, target.target_ids, batch, 2).drafts > 0
