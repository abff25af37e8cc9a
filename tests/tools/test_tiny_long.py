"""Long prompts for the embedded target, by the command."""

import json
from collections import Counter

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
    shipped = {json.dumps(row["messages"]) for row in read_prompts(EMBEDDED / "prompts.jsonl")}
    counts = Counter()
    for row in mix:
        counts[row["split"], row["category"]] += 1
        if row["category"].endswith("k"):
            rendered = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)
            length = len(rendered["input_ids"])
            assert length == pytest.approx(1024 * int(row["category"][:-1]), rel=0.02)
            assert length + 256 < config.max_position_embeddings
        else:
            assert json.dumps(row["messages"]) in shipped
    assert {k: n for k, n in counts.items() if k[0] == "heldout"} == {
        ("heldout", f"{length:02}k"): 16 for length in (1, 2, 4, 8, 16)
    }
    questions = [json.loads(text)[0]["content"] for text in shipped]
    contents = {n: [row["messages"][0]["content"] for row in heldout if row["category"] == f"{n:02}k"] for n in (1, 16)}
    asked = [
        [max((q for q in questions if text.endswith(f"```\n\n{q}")), key=len) for text in texts]
        for texts in contents.values()
    ]
    assert len(set(asked[0])) == 16
    assert asked[0] == asked[1]
    assert sum(n for (split, category), n in counts.items() if split == "train" and category.endswith("k")) == 200
