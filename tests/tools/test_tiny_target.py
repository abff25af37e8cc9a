"""The embedded default: chat template, shipped target, shipped prompts, and the rules that built them."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssForCausalLM

from drafthead.data.prompts import prompt_id
from tests.scripts import run_ok
from tools.tiny.architecture import ARCHITECTURES, target_config
from tools.tiny.batches import encode_sample, group
from tools.tiny.corpus import Function, is_heldout
from tools.tiny.files import read_prompts, read_record
from tools.tiny.measure import Answer, check, report
from tools.tiny.samples import CATEGORIES, Sample, build_samples
from tools.tiny.tokenizer import SPECIAL_TOKENS
from tools.tiny.trainer import answer_loss, new_model

TINY = Path(__file__).parents[2] / "data_gen" / "tiny"
TARGET = TINY / "target"
# Held-out samples measure 0.62 (training.json); random weights give 8.0.
MAX_ANSWER_LOSS = 1.0


def render(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_prompt_has_harmony_structure(tokenizer: Any) -> None:
    text = render(tokenizer, [{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == (
        "<|start|>system<|message|>Reasoning: medium\n# Valid channels: analysis, final<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    )


def test_old_analysis_is_dropped(tokenizer: Any) -> None:
    user = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Yes", "thinking": "old thoughts"}
    history = render(tokenizer, [user, answer, user], add_generation_prompt=True)
    assert "old thoughts" not in history
    assert "<|start|>assistant<|channel|>final<|message|>Yes<|end|>" in history
    last = render(tokenizer, [user, answer])
    assert "<|channel|>analysis<|message|>old thoughts<|end|>" in last
    assert last.endswith("<|channel|>final<|message|>Yes<|return|>")


def test_a_system_prompt_becomes_a_developer_message(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>" in render(tokenizer, messages)


def test_text_comes_back_from_its_tokens_and_control_tokens_come_first(tokenizer: Any) -> None:
    text = "def f(x):\n    return {'é': x}\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.eos_token == "<|return|>"


def test_the_target_has_its_architecture_and_knows_its_task(tokenizer: Any) -> None:
    model = GptOssForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    config = model.config
    assert model.num_parameters() == read_record(TARGET)["parameters"]
    assert config.num_hidden_layers >= 6
    assert config.layer_types[:2] == ["sliding_attention", "full_attention"]
    assert config.rope_parameters["rope_type"] == "yarn"
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    items = [encode_sample(sample, "medium", tokenizer) for sample in heldout_samples()]
    assert items
    assert answer_loss(model, group(items, 2048, tokenizer.pad_token_id, 0)) < MAX_ANSWER_LOSS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_target_starts_with_a_head_that_looks_one_position_back(tokenizer: Any, architecture: str) -> None:
    model = new_model(target_config(tokenizer, architecture), 0)
    model.set_attn_implementation("eager")
    ids = torch.randint(20, len(tokenizer), (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attention = model(ids, output_attentions=True).attentions[0][0, 0]  # head 0 of layer 0: (T, T)
    assert attention.diagonal(-1).min() > 0.6


def test_shipped_prompts_are_whole_and_their_splits_share_no_module() -> None:
    rows = read_prompts(TINY / "prompts.jsonl")
    counts = Counter((row["split"], row["category"]) for row in rows)
    assert counts == {(s, c): n for s, n in (("train", 600), ("heldout", 50)) for c in CATEGORIES}
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == {"id", "source", "category", "split", "module", "messages"}
        assert row["source"] == "tiny"
        assert row["id"] == prompt_id(row["messages"])
        assert [message["role"] for message in row["messages"]] == ["user"]
        assert (row["split"] == "heldout") == is_heldout(row["module"])


def test_corpus_and_prompts_are_reproducible() -> None:
    """In two processes, which hash differently. Of the whole library reading takes seconds."""
    code = """
import sysconfig
from pathlib import Path
from tools.tiny.corpus import read_library
from tools.tiny.samples import build_samples, prompt_rows
functions, classes = read_library(Path(sysconfig.get_path("stdlib"), "asyncio"))
print(prompt_rows(build_samples(functions, classes, 1, 0), {"train": 5}, 0, ("chat", "code")))
"""
    first, second = (run_ok("-c", code, PYTHONHASHSEED=seed) for seed in "12")
    assert len(first) > 1000
    assert first == second


def test_answers_that_do_not_end_are_reported_and_refused() -> None:
    answers = [Answer("chat", list(range(30)), True), Answer("chat", [7] * 256, False)]
    result = report(answers)
    assert result["all"]["good"] == 0.5
    with pytest.raises(ValueError, match="raise --steps"):
        check(result)


def heldout_samples() -> list[Sample]:
    """A few requests about a function that no corpus contains."""
    source = "def parse_rate(text, unit='s'):\n    value = float(text)\n    return scale(value, unit)"
    function = Function("module", "", ast.parse(source).body[0], "")
    return build_samples([function] * 4, [], 3, 0)
