"""Every form of rotation that vLLM knows: computed alike at every position, or refused by type and key."""

import inspect
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafthead.drafters.layers import Rotary
from drafthead.engine.offline import import_vllm
from drafthead.target.rope import head_rope, imported_rope
from tests.damage import edit_config
from tests.drafters.small_draft import small_model
from tests.scripts import run_here

HEAD_DIM, POSITIONS, ORIGINAL = 32, 4096, 1024
BASE: dict[str, Any] = {"rope_theta": 1e4}
SCALED = {**BASE, "factor": 4.0}
STRETCHED = {**SCALED, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {"rope_type": "llama3", **STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0] * (HEAD_DIM // 2), "long_factor": [2.0] * (HEAD_DIM // 2)}
SECTIONS = {"mrope_section": [4, 6, 6]}
FOPE = {"use_fope": True, "num_key_value_heads": 2, "num_inv_freq": 8, "fope_sep_head": True, "fope_init_factor": 0.1}
# Every branch of vLLM's `get_rope`, and why it is refused; a dict: what a target's head makes of it.
FORMS: list[tuple[dict[str, Any], str | dict[str, Any] | None]] = [
    ({"rope_type": "default", **BASE}, None),
    ({"rope_type": "default", **BASE, "partial_rotary_factor": 0.5}, {"rope_type": "default", **BASE}),
    ({"rope_type": "default", **BASE, "rope_dim": 16}, {"rope_type": "default", **BASE}),
    ({"rope_type": "default", **BASE, **SECTIONS}, {"rope_type": "default", **BASE}),
    ({"rope_type": "default", **BASE, **SECTIONS, "mrope_interleaved": True}, {"rope_type": "default", **BASE}),
    ({"rope_type": "default", **BASE, **FOPE}, "default with use_fope=True"),
    ({"rope_type": "bailing_mrope", **BASE, **SECTIONS}, "bailing_mrope"),
    ({"rope_type": "openpangu", **BASE, **SECTIONS, "mrope_interleaved": True}, "openpangu"),
    ({"rope_type": "mllama4", **BASE}, "mllama4"),
    ({"rope_type": "proportional", **BASE, "partial_rotary_factor": 0.25}, "proportional"),
    ({"rope_type": "linear", **SCALED}, None),
    ({"rope_type": "linear", **BASE, "factor": 2.5}, None),
    ({"rope_type": "linear", **BASE, "factor": 0.5}, "linear with factor=0.5"),
    ({"rope_type": "linear", **BASE, "factor": [1.0, 2.0]}, "linear with factor="),
    ({"rope_type": "linear", **BASE}, "linear with no factor"),
    ({"rope_type": "ntk", **SCALED}, "ntk,"),
    ({"rope_type": "ntk", **SCALED, "mixed_b": 0.6}, "ntk with mixed_b=0.6"),
    ({"rope_type": "dynamic", **SCALED}, None),
    ({"rope_type": "dynamic", **SCALED, "beta_fast": 32, "mscale": 1.0}, None),
    ({"rope_type": "dynamic", **SCALED, "alpha": 1000.0}, "dynamic with alpha=1000.0"),
    ({"rope_type": "dynamic", **BASE, "alpha": 1000.0}, "dynamic with alpha=1000.0"),
    ({"rope_type": "dynamic", **SCALED, "max_trained_positions": 512}, "dynamic with max_trained_positions=512"),
    (LLAMA3, None),
    (LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}, "llama3 with low_freq_factor=4.0 not below"),
    ({**LLAMA3, "alpha": 2.0}, "llama3 with alpha=2.0"),
    ({"rope_type": "yarn", **STRETCHED}, None),
    ({"rope_type": "yarn", **STRETCHED, "truncate": False, "beta_fast": 16, "beta_slow": 2}, None),
    ({"rope_type": "yarn", **STRETCHED, "mscale": 0.7, "mscale_all_dim": 1.2}, None),
    ({"rope_type": "yarn", **STRETCHED, "mscale": 0.7, "mscale_all_dim": 0}, None),
    ({"rope_type": "yarn", **STRETCHED, "attention_factor": 0.5, "mscale": 0.7, "finetuned": True}, None),
    ({"rope_type": "yarn", **STRETCHED, "beta_fast": 0}, "yarn with beta_fast=0"),
    ({"rope_type": "yarn", **STRETCHED, "truncate": "no"}, "yarn with truncate='no'"),
    ({"rope_type": "yarn", **STRETCHED, **SECTIONS}, {"rope_type": "yarn", **STRETCHED}),
    ({"rope_type": "deepseek_yarn", **STRETCHED}, "deepseek_yarn"),
    ({"rope_type": "deepseek_yarn", **STRETCHED, "is_deepseek_v4": True}, "deepseek_yarn with is_deepseek_v4=True"),
    ({"rope_type": "deepseek_llama_scaling", **STRETCHED}, "deepseek_llama_scaling"),
    ({"rope_type": "longrope", **STRETCHED, **LONG}, "longrope with short_factor="),
    ({"rope_type": "longrope", **STRETCHED, **LONG, "short_mscale": 1.1}, "longrope with .*short_mscale=1.1"),
]


@pytest.fixture(scope="module")
def get_rope():
    """vLLM's own, as its draft model calls it, outside of an engine."""
    import_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    with set_current_vllm_config(VllmConfig()):
        yield rotary_embedding.get_rope


def vllm_table(get_rope: Any, parameters: dict[str, Any]) -> Tensor:
    """(positions, HEAD_DIM): cos, then sin."""
    rope = get_rope(HEAD_DIM, max_position=POSITIONS, rope_parameters=parameters, dtype=torch.float32)
    return rope.cos_sin_cache[:POSITIONS]


def our_table(parameters: dict[str, Any]) -> Tensor:
    shape = small_model().shape
    head = shape.head.model_copy(update={"head_dim": HEAD_DIM})
    shape = replace(shape, head=head, rope_parameters=parameters, max_position_embeddings=POSITIONS)
    cos, sin = Rotary(shape)(torch.arange(POSITIONS), torch.float32)
    return torch.cat([cos[:, 0, : HEAD_DIM // 2], sin[:, 0, : HEAD_DIM // 2]], dim=-1)


def assert_alike(get_rope: Any, parameters: dict[str, Any], ours: dict[str, Any]) -> None:
    """At the positions of vLLM's table. A frequency of at most 1 is rounded to float32 a few times on either side, and
    once more when a position is multiplied with it."""
    rounding = 8 * POSITIONS * torch.finfo(torch.float32).eps
    theirs = vllm_table(get_rope, parameters)
    torch.testing.assert_close(our_table(ours)[: len(theirs)], theirs, rtol=0, atol=rounding)


def config_with(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"max_position_embeddings": POSITIONS, "rope_parameters": parameters}


def _name(value: object) -> str:
    return "-".join(f"{key}={item}" for key, item in value.items())[:60] if isinstance(value, dict) else ""


@pytest.mark.slow
@pytest.mark.parametrize(("form", "outcome"), FORMS, ids=_name)
def test_a_rotation_is_computed_alike_or_refused_by_its_key(get_rope, form, outcome):
    config = config_with(form)
    if isinstance(outcome, str):
        with pytest.raises(ValueError, match=rf"target acme .* rope_type {outcome}.* give another target\.path"):
            head_rope(config, "acme")
    else:
        ours = head_rope(config, "acme")
        assert ours == (outcome or {key: form[key] for key in ours})
        assert_alike(get_rope, ours, ours)  # what an export writes
    if outcome is None:
        assert_alike(get_rope, form, imported_rope(config))  # what the head's maker served
    else:
        with pytest.raises(ValueError, match=r"the head rotates by rope_type .*\beval\.methods"):
            imported_rope(config)


@pytest.mark.slow
def test_no_key_that_vllm_reads_slips_through(get_rope):
    """Every key that stands in vLLM's source, with every type that is computed: it changes nothing, or is refused."""
    source = inspect.getsource(inspect.unwrap(get_rope))
    names = {"rope_type", "rope_theta", "default", "linear", "dynamic", "llama3", "yarn"}
    keys = set(re.findall(r"\"([a-z_0-9]+)\"", source)) - names
    assert {"alpha", "mixed_b", "use_fope", "rope_dim", "max_trained_positions", "mrope_section"} <= keys
    values = {"mrope_section": [4, 6, 6], "truncate": False, "partial_rotary_factor": 0.5, "rope_dim": 16}
    accepted = 0
    for form in (form for form, outcome in FORMS if outcome is None):
        for key in sorted(keys):
            changed = {**form, key: values.get(key, 2.0)}
            try:
                ours = imported_rope(config_with(changed))
            except ValueError:
                continue
            accepted += 1
            assert_alike(get_rope, changed, ours)
    assert accepted > len(FORMS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "rotation"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 5e5}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 7.0}}, {"factor": 2.0}),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, {"original_max_position_embeddings": POSITIONS}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}, "original_max_position_embeddings": 512},
            {"original_max_position_embeddings": 512},
        ),
        ({"rope_theta": 2e4}, {"rope_type": "default", "rope_theta": 2e4}),
        ({"rope_parameters": {"rope_theta": 3e4}, "rope_theta": 1e4}, {"rope_theta": 3e4}),
    ],
)
def test_a_config_is_read_as_vllm_reads_it(tmp_path, written, rotation):
    import_vllm()
    from vllm.transformers_utils.config import get_config

    config = {"model_type": "llama", "max_position_embeddings": POSITIONS, **written}
    (tmp_path / "config.json").write_text("{}")
    edit_config(tmp_path, **config)
    read = head_rope(json.loads((tmp_path / "config.json").read_text()), "acme")
    assert rotation.items() <= read.items()
    assert get_config(tmp_path, trust_remote_code=False).rope_parameters.items() >= read.items()


@pytest.mark.parametrize("name", ["partial_rotary_factor", "rotary_pct", "rotary_emb_fraction"])
def test_a_share_of_the_head_dim_is_found_under_every_name(name):
    config = {**config_with({"rope_type": "default", **BASE}), name: 0.5}
    assert head_rope(config, "acme") == {"rope_type": "default", **BASE}
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5"):
        imported_rope(config)
    assert imported_rope({**config, name: 1.0}) == {"rope_type": "default", **BASE}


def test_a_target_that_rotates_otherwise_is_refused_at_the_first_command(target, tmp_path, capsys):
    edit_config(target, rope_parameters={"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4})
    assert run_here("data_gen/prompts.py", f"output_dir={tmp_path / 'out'}", f"target.path={target}") == 1
    assert "dynamic with alpha=1000.0" in capsys.readouterr().err
