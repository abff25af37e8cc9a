"""Small targets of other architectures, taught a language that a draft can learn in a minute."""

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from drafthead.config import load_recipe

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


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_sizes(), rope_parameters=_LLAMA_ROPE))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_sizes(), tie_word_embeddings=True))


def _qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **_sizes(), moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )
    return Qwen3MoeForCausalLM(config)


FAMILIES = {"llama": _llama, "qwen3, tied embeddings": _qwen3, "qwen3_moe": _qwen3_moe}


def write_target(family: str, directory: Path, steps: int = 200) -> Path:
    """A trained target of a family, with the embedded target's tokenizer and chat template."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
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
