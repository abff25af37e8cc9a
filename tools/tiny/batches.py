"""Encode samples with the chat template and group them into batches of similar length.

Gives up: perfect shuffling; samples are shuffled, then sorted by length inside windows.
Alternative: pack samples into fixed sequences; attention over 1,024 positions costs five times the step.
"""

import random
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from tools.tiny.samples import EFFORTS, Sample

PROMPT_WEIGHT = 0.15
WINDOW = 1024


@dataclass(frozen=True)
class Encoded:
    """Token ids of one conversation; the first `prompt_length` of them are the prompt."""

    ids: list[int]
    prompt_length: int


@dataclass(frozen=True)
class Batch:
    """Padded ids, and for each position the weight of predicting the token there."""

    ids: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor


def encode_samples(
    samples: list[Sample], tokenizer: PreTrainedTokenizerFast, max_length: int, seed: int
) -> list[Encoded]:
    """Encode each sample at one random effort; conversations longer than `max_length` are left out."""
    choose = random.Random(seed)
    encoded = [encode_sample(sample, choose.choice(EFFORTS), tokenizer) for sample in samples]
    return [item for item in encoded if len(item.ids) <= max_length]


def encode_sample(sample: Sample, effort: str, tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Encode request and answer; the split lies before a control token, so no merge crosses it."""
    user = {"role": "user", "content": sample.prompt}
    answer = {"role": "assistant", "content": sample.answer, "thinking": sample.thinking(effort)}
    prompt = _render(tokenizer, [user], effort, add_generation_prompt=True)
    whole = _render(tokenizer, [user, answer], effort, add_generation_prompt=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = tokenizer.encode(whole.removeprefix(prompt), add_special_tokens=False)
    return Encoded(prompt_ids + answer_ids, len(prompt_ids))


def group(items: list[Encoded], tokens_per_batch: int, pad_id: int, seed: int) -> list[Batch]:
    """Shuffle, sort by length inside windows, and cut into batches of at most `tokens_per_batch`."""
    choose = random.Random(seed)
    shuffled = choose.sample(items, len(items))
    groups: list[list[Encoded]] = []
    for start in range(0, len(shuffled), WINDOW):
        current: list[Encoded] = []
        for item in sorted(shuffled[start : start + WINDOW], key=lambda e: len(e.ids)):
            if current and len(item.ids) * (len(current) + 1) > tokens_per_batch:
                groups.append(current)
                current = []
            current.append(item)
        groups.append(current)
    choose.shuffle(groups)
    return [_pad(members, pad_id) for members in groups]


def _pad(items: list[Encoded], pad_id: int) -> Batch:
    ids = pad_sequence([torch.tensor(item.ids) for item in items], batch_first=True, padding_value=pad_id)
    weights = torch.zeros(ids.shape)
    for row, item in enumerate(items):
        weights[row, : item.prompt_length] = PROMPT_WEIGHT
        weights[row, item.prompt_length : len(item.ids)] = 1.0
    return Batch(ids, (weights > 0).long(), weights)


def _render(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], effort: str, add_generation_prompt: bool
) -> str:
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, reasoning_effort=effort
    )
