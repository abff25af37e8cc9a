"""Targets of the other families that recipes are shipped for, from prompts to a head that vLLM drafts with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.artifacts import require
from drafthead.config import load_recipe
from drafthead.target.spec import load_target_spec
from tests.scripts import accelerate, run_ok

EMBEDDED = Path(load_recipe().target_path)
WORDS = torch.arange(300, 397)  # ordinary tokens; after word i comes word 5 i + 1, modulo 97
_LLAMA_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip


def _sizes() -> dict:
    embedded = json.loads((EMBEDDED / "config.json").read_text())
    return {
        "vocab_size": embedded["vocab_size"], "eos_token_id": embedded["eos_token_id"], "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 4096,
    }  # fmt: skip


FAMILIES = {
    "llama": {"rope_parameters": _LLAMA_ROPE},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}


def write_target(family: str, directory: Path, steps: int = 200) -> Path:
    """A trained target of a family, with the embedded target's tokenizer and chat template."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_sizes(), **FAMILIES[family]))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20, (steps - step) / 100)
        texts = _texts(16, model.config.vocab_size)
        loss = model(texts, labels=texts).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(EMBEDDED / name, directory / name)
    return directory


def _texts(count: int, vocab_size: int, length: int = 64) -> Tensor:
    """(count, length) tokens: some of any kind, as a prompt is to this target, and then words from anywhere on."""
    texts = torch.randint(vocab_size, (count, length))
    starts = torch.randint(4, 24, (count,))
    word = torch.randint(len(WORDS), (count,))
    for place in range(length):
        said = starts <= place
        texts[said, place] = WORDS[word[said]]
        word = torch.where(said, (5 * word + 1) % len(WORDS), word)
    return texts


_SMALL = (
    "target.aux_layer_ids=[1,2,3]", "prompts.max_train=96", "prompts.max_heldout=8", "prompts.validation=16",
    "responses.temperature=1", "responses.max_tokens=48", "responses.prompts_per_part=96", "head.draft_vocab_size=1024",
    "train.epochs=20", "train.checkpoint_every=100", "train.learning_rate=3e-3",
)  # fmt: skip


@pytest.mark.presets
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gets_a_head_that_vllm_accepts(family, tmp_path):
    target = write_target(family, tmp_path / "target")
    overrides = (f"output_dir={tmp_path / 'out'}", f"target.path={target}", *_SMALL)
    for script in ("data_gen/prompts.py", "data_gen/regenerate.py", "data_gen/harvest.py"):
        run_ok(script, *overrides)
    run_ok(*accelerate(), "train/eagle3.py", *overrides)
    run_ok("export/head.py", *overrides)  # which compares served acceptance with the prediction
    recipe = load_recipe(overrides=overrides)
    served = require(recipe.head_dir, "head", "export")["counts"]["serve_check"]
    assert served["served"] > 3
    assert load_target_spec(str(target)).tie_word_embeddings == (family == "qwen3")
