"""The tiny targets' shapes, of 3.8 M parameters: gpt-oss (MoE, sinks, alternating windows, YaRN) and Qwen3 (dense).

Gives up: MXFP4 experts and gpt-oss's 32 to 128 experts; the weights are plain bf16 and there are four.
Alternative: a dense model alone trains faster, but exercises none of the code a gpt-oss head needs.
"""

from transformers import GptOssConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

CONTEXT_LENGTH = 2048
ARCHITECTURES = ("gpt_oss", "qwen3")  # the first one is shipped


def target_config(tokenizer: PreTrainedTokenizerFast, architecture: str) -> PreTrainedConfig:
    """Return the model configuration for this tokenizer's vocabulary and control tokens."""
    bos, eos, pad = (
        tokenizer.convert_tokens_to_ids(token) for token in ("<|startoftext|>", "<|return|>", "<|endoftext|>")
    )
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    if architecture == "qwen3":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        return Qwen3Config(architectures=["Qwen3ForCausalLM"], intermediate_size=384, rope_parameters=rope, **shared)
    return GptOssConfig(
        architectures=["GptOssForCausalLM"],
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=96,
        sliding_window=128,
        # vLLM reads every one of these keys for gpt-oss, so plain RoPE is not an option.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": CONTEXT_LENGTH // 2,
            "truncate": False,
        },
        attention_bias=True,
        router_aux_loss_coef=0.01,
        **shared,
    )
