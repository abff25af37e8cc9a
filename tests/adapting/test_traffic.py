"""Traffic from a file: what a client would send, or an error with file and line before a server starts."""

import json

import pytest

from drafthead.adapting.control import read_traffic
from tests.recipes import tiny_recipe


def test_a_chat_is_sent_up_to_its_last_question(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "said before", "thinking": "b"}]
    rows = [{"messages": chat}, {"prompt_ids": [5, 6]}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chat, ids = read_traffic(tiny_recipe(tmp_path), tmp_path / "t.jsonl")
    assert "said before" not in tokenizer.decode(chat.prompt_ids)
    assert ids.prompt_ids == [5, 6]


@pytest.mark.parametrize("row", [{"promt": "b"}, {"prompt": "what is <|end|>?"}])
def test_a_row_that_cannot_be_sent_is_named(row, tmp_path):
    (tmp_path / "t.jsonl").write_text(f'{{"prompt": "a"}}\n{json.dumps(row)}')
    with pytest.raises(ValueError, match=r"t\.jsonl:2: "):
        read_traffic(tiny_recipe(tmp_path), tmp_path / "t.jsonl")
