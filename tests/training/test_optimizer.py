"""The optimiser by itself: its rate, and clipping."""

import pytest
import torch

from drafthead.config import load_recipe
from drafthead.drafters.base import draft_shape
from drafthead.drafters.registry import drafter_of
from drafthead.target.spec import load_target_spec
from drafthead.training.optimizer import build_optimizer, rate_share


def adamw(**train) -> tuple:
    settings = {"optimizer": "adamw", **train}
    config = load_recipe(overrides=[f"train.{key}={value}" for key, value in settings.items()]).train
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return config, model, build_optimizer(config, model)


def test_the_optimiser_is_plain_adamw():
    config, model, optimizer = adamw(zero_stage=1)
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.AdamW
    assert group["params"] == list(model.parameters())
    assert (group["lr"], group["betas"], group["weight_decay"]) == (config.learning_rate, (0.9, 0.95), 0.0)


@pytest.mark.parametrize(("decay_ratio", "falls_from", "last"), [("null", 3, 0.1), (0.2, 80, 0.05)])
def test_the_rate_warms_up_and_falls(decay_ratio, falls_from, last):
    config, _, _ = adamw(decay_ratio=decay_ratio)
    shares = [rate_share(config, step, 100) for step in range(100)]
    assert shares[0] == pytest.approx(1 / 3)
    assert shares[2] == shares[3] == shares[falls_from] == 1.0 > shares[falls_from + 1]
    assert shares[3:] == sorted(shares[3:], reverse=True)
    assert shares[99] == pytest.approx(last, abs=1e-3)


def test_at_zero_0_the_gradient_is_clipped_and_its_norm_told():
    _, model, optimizer = adamw(zero_stage=0, precision="fp32")
    (model(torch.ones(1, 3)) * torch.tensor([3.0, 4.0])).sum().backward()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(10.0)  # rows of (3, 3, 3, 3) and (4, 4, 4, 4), bias included
    assert torch.cat([p.grad.flatten() for p in model.parameters()]).norm() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
def test_muon_takes_what_leads_from_hidden_states_to_hidden_states(kind):
    """No row per token, no embedding, no vector."""
    parallel = ("head.mask_token_id=9", "head.num_draft_positions=4") if kind != "eagle3" else ()
    recipe = load_recipe(overrides=["train.optimizer=muon", f"head.type={kind}", *parallel])
    spec = load_target_spec(recipe.target_path)
    model = drafter_of(recipe.head).MODULE(draft_shape(recipe.head, spec, recipe.target.aux_layer_ids))
    matrices = {id(parameter) for parameter in build_optimizer(recipe.train, model).param_groups[0]["params"]}
    names = {name.split(".")[-2] for name, parameter in model.named_parameters() if id(parameter) in matrices}
    assert names == {"fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_muon_iterates_in_bfloat16_where_the_cpu_multiplies_it_and_the_recipe_says_so(
    monkeypatch, precision, supported
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    recipe = load_recipe(overrides=["train.optimizer=muon", f"train.precision={precision}"])
    spec = load_target_spec(recipe.target_path)
    model = drafter_of(recipe.head).MODULE(draft_shape(recipe.head, spec, recipe.target.aux_layer_ids))
    method = build_optimizer(recipe.train, model).param_groups[0]["ns_method"]
    assert method == ("standard" if supported and precision == "bf16" else "gram")
