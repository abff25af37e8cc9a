"""Train the tiny target's tokenizer: byte-level BPE with Harmony's special tokens and chat template.

Gives up: a vocabulary as large as gpt-oss's 201,088 entries; text outside Python source costs more tokens.
Alternative: reuse the o200k_harmony vocabulary, whose embedding alone would be ten times this model.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 3072
# Order is part of the format: these become ids 0..11, so that ids of control tokens never move when
# the corpus changes.
SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|endofprompt|>",
)
TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts` and return a tokenizer that carries the chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)
    if bpe.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus yields only {bpe.get_vocab_size()} of {VOCAB_SIZE} entries: pass more text")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|startoftext|>",
        eos_token="<|return|>",
        pad_token="<|endoftext|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE_FILE.read_text(encoding="utf-8")
    return tokenizer
