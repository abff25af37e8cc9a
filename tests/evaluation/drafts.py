"""Random drafts of the embedded target for the methods this project does not train: they show that vLLM serves them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from drafthead.config import Recipe


def write_llama(directory: Path, recipe: Recipe, layers: int = 1) -> Path:
    """A Llama with the target's vocabulary and width, for draft_model."""
    target = json.loads((Path(recipe.target_path) / "config.json").read_text())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=target["vocab_size"], hidden_size=target["hidden_size"], intermediate_size=256,
        num_hidden_layers=layers, num_attention_heads=target["num_attention_heads"],
        num_key_value_heads=target["num_key_value_heads"], head_dim=target["head_dim"],
        max_position_embeddings=target["max_position_embeddings"], tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def write_eagle(directory: Path, recipe: Recipe) -> Path:
    """One Llama block behind a projection of embedding and hidden state, for eagle."""
    write_llama(directory, recipe)
    config = json.loads((directory / "config.json").read_text())
    size = config["hidden_size"]
    state = LlamaForCausalLM.from_pretrained(directory).state_dict()
    kept = {
        name.removeprefix("model."): tensor.to(torch.bfloat16).contiguous()
        for name, tensor in state.items()
        if ".layers.0." in name and "input_layernorm" not in name  # EAGLE's block reads its input as it is
    }
    save_file({**kept, "fc.weight": torch.randn(size, 2 * size).to(torch.bfloat16)}, directory / "model.safetensors")
    return directory


def write_medusa(directory: Path, recipe: Recipe, heads: int = 3) -> Path:
    """Residual blocks and vocabulary heads, for medusa."""
    target = json.loads((Path(recipe.target_path) / "config.json").read_text())
    size, vocabulary = target["hidden_size"], target["vocab_size"]
    directory.mkdir(parents=True)
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": size, "vocab_size": vocabulary}
    config |= {"num_heads": heads, "num_hidden_layers": 1, "truncated_vocab_size": vocabulary}
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {f"blocks.{i}.layers.0.weight": torch.zeros(size, size) for i in range(heads)}
    tensors |= {f"lm_heads.{i}.weight": torch.randn(vocabulary, size) for i in range(heads)}
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
