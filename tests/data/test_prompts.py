"""The prompts artifact: what is stored comes back, and what nothing uses is not stored."""

import pyarrow.parquet as pq

from drafthead.data.prompts import Prompt, prompt_id, read_prompts, write_prompts

MESSAGES = ({"role": "user", "content": "hi"},)


def test_a_prompt_of_messages_keeps_its_id_and_its_four_columns(tmp_path):
    prompt = Prompt(prompt_id(MESSAGES), "local", "chat", MESSAGES)
    assert prompt.id == "4e79873118cd9be7"  # of the first artifacts
    write_prompts(tmp_path / "train.parquet", [prompt])
    assert pq.read_schema(tmp_path / "train.parquet").names == ["id", "source", "category", "messages"]
    assert read_prompts(tmp_path, "train") == [prompt]


def test_optional_fields_come_back_and_make_ids_of_their_own(tmp_path):
    tools = ({"type": "function", "function": {"name": "f", "default": None}},)
    response = {"role": "assistant", "content": "hello", "thinking": "?"}
    prompts = [
        Prompt(prompt_id(MESSAGES, tools=tools), "local", "chat", MESSAGES, tools=tools, response=response),
        Prompt(prompt_id((), (1, 2)), "mlperf", "long", (), prompt_ids=(1, 2), document="a"),
    ]
    write_prompts(tmp_path / "train.parquet", prompts)
    assert read_prompts(tmp_path, "train") == prompts
    assert "answer" in pq.read_schema(tmp_path / "train.parquet").names  # the column of the first artifacts
    assert len({prompt_id(MESSAGES), *(p.id for p in prompts)}) == 3
