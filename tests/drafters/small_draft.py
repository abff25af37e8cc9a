"""Draft models of a few hundred weights in float64, whose norms are not ones, a drafter, and a frozen target."""

from functools import partial

import torch

from drafthead.data.packing import pack, whole
from drafthead.drafters.base import DraftModule, DraftShape
from drafthead.drafters.batch import PackedBatch
from drafthead.drafters.eagle3.drafter import DraftModel, Eagle3
from drafthead.drafters.registry import drafter_of, parse_head
from drafthead.target.pieces import FrozenTarget

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64, "truncate": False,
}  # fmt: skip


SIZES = {"intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MASK = 19
NUM_STEPS = 3


def _float64(kind, num_layers=1, num_aux_layers=3, rope=YARN, **settings):
    head = parse_head({"type": kind, "draft_vocab_size": 11, "num_layers": num_layers, **SIZES, **settings})
    torch.manual_seed(num_layers)
    model = drafter_of(head).MODULE(DraftShape(head, 8, 20, num_aux_layers, 1e-5, rope, 256)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "sink" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    if kind == "peagle":
        model.mask_embedding = torch.full((8,), 0.5, dtype=torch.float64)
    return model


small_model = partial(_float64, "eagle3")
peagle_model = partial(_float64, "peagle", mask_token_id=MASK)
dflash_model = partial(_float64, "dflash", mask_token_id=MASK)
dspark_model = partial(_float64, "dspark", mask_token_id=MASK, markov_rank=3)


def eagle3(num_steps: int) -> Eagle3:
    """The drafter of the small model, trained at this many steps."""
    return Eagle3(small_model().shape.head.model_copy(update={"num_ttt_steps": num_steps}))


def unrolled(model: DraftModel, *arguments) -> torch.Tensor:
    """(K, R, H) as training computes them."""
    return torch.stack(model.unroll(*arguments)[0])


def packed(store, drafter, windows=None, **options) -> PackedBatch:
    """These windows, or all documents, as one batch in float64."""
    windows = windows or [whole(i, store.tokens(i)[1], drafter) for i in range(len(store))]
    return pack(store, windows, drafter, **options).to(torch.device("cpu"), torch.float64)


def frozen(model: DraftModule) -> FrozenTarget:
    """A target beside the small model: eight dimensions, twenty tokens."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(model.shape.vocab_size, 8, generator=generator, dtype=torch.float64)
    ids = torch.arange(0, 2 * model.shape.head.draft_vocab_size, 2)[: model.shape.head.draft_vocab_size].clamp_max(19)
    return FrozenTarget(rows, torch.ones(8, dtype=torch.float64), rows[ids], 1e-5, ids)
