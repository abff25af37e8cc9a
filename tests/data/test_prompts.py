"""The prompts artefact: what is stored comes back, and what nothing uses is not stored."""

import pyarrow.parquet as pq
import pytest

from drafthead.data.prompts import Prompt, parse_prompt, prompt_id, read_prompts, write_prompts

ASK = ({"role": "user", "content": "hi"},)


def test_a_prompt_of_messages_keeps_its_id_and_its_four_columns(tmp_path):
    prompt = Prompt(prompt_id(ASK), "local", "chat", ASK)
    assert prompt.id == "4e79873118cd9be7"  # of before there were token ids and tools
    write_prompts(tmp_path / "train.parquet", [prompt])
    assert pq.read_schema(tmp_path / "train.parquet").names == ["id", "source", "category", "messages"]
    assert read_prompts(tmp_path, "train") == [prompt]


def test_token_ids_tools_and_documents_come_back(tmp_path):
    tools = ({"type": "function", "function": {"name": "f"}},)
    prompts = [
        Prompt(prompt_id(ASK, tools=tools), "local", "chat", ASK, tools=tools),
        Prompt(prompt_id((), (1, 2)), "mlperf", "long", (), prompt_ids=(1, 2), document="a"),
    ]
    write_prompts(tmp_path / "train.parquet", prompts)
    assert read_prompts(tmp_path, "train") == prompts
    assert len({prompt_id(ASK), *(p.id for p in prompts)}) == 3


def test_a_row_of_token_ids_is_a_prompt_and_anything_else_is_named():
    prompt = parse_prompt({"prompt_ids": [3, 1, 2], "category": "long"}, "p:1")
    assert (prompt.prompt_ids, prompt.messages, prompt.category) == ((3, 1, 2), (), "long")
    for bad in ([], [-1], [1.0], [True], "12", None):
        with pytest.raises(ValueError, match="p:1: `prompt_ids` must be a non-empty list of token ids"):
            parse_prompt({"prompt_ids": bad}, "p:1")
