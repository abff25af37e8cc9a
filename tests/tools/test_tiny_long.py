"""Long prompts for the embedded target, by the command."""

from collections import defaultdict

import pytest
from transformers import AutoConfig, AutoTokenizer

from tools.tiny.files import read_prompts
from tools.tiny_long import EMBEDDED, main


def test_prompts_have_their_lengths_and_the_sibling_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tools.tiny_long", str(tmp_path)])
    main()
    config = AutoConfig.from_pretrained(tmp_path / "target")
    assert config.rope_parameters["factor"] == 32
    assert (tmp_path / "target" / "model.safetensors").stat().st_size > 7e6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    short, mix = (read_prompts(tmp_path / f"{name}.jsonl") for name in ("short", "mix"))
    heldout = [row for row in mix if row["split"] == "heldout"]
    assert [row for row in short if row["split"] == "heldout"] == heldout
    assert len(short) == len(mix) == 2400 + len(heldout)
    shipped = {row["messages"][0]["content"] for row in read_prompts(EMBEDDED / "prompts.jsonl")}
    asked = defaultdict(list)
    for row in mix:
        content = row["messages"][0]["content"]
        long = row["category"].endswith("k")
        question = content.split("```\n\n", 1)[1] if long else content
        assert question in shipped
        asked[row["split"], row["category"]].append(question)
        if long:
            rendered = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)
            length = len(rendered["input_ids"])
            assert length == pytest.approx(1024 * int(row["category"][:-1]), rel=0.02)
            assert length + 256 < config.max_position_embeddings
    same = {category: questions for (split, category), questions in asked.items() if split == "heldout"}
    assert same == dict.fromkeys(("01k", "02k", "04k", "08k", "16k"), same["01k"])
    assert len(set(same["01k"])) == 16
    assert sum(len(asked["train", category]) for category in same) == 200
