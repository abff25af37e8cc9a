"""Long prompts for the embedded target, by the command."""

from collections import defaultdict

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tools.tiny.batches import encode_sample
from tools.tiny.files import read_prompts
from tools.tiny.lengthen import divergences, lengthen
from tools.tiny.samples import Sample
from tools.tiny_long import EMBEDDED, main


def load(path, attention):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()


def test_prompts_have_their_lengths_and_the_sibling_reads_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tools.tiny_long", str(tmp_path), "--steps", "1"])
    main()
    assert "step 1/1   1k  divergence " in capsys.readouterr().out
    assert not (tmp_path / "unfinished-target").exists()
    assert (tmp_path / "target" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    trained, embedded = (load(path, "eager") for path in (tmp_path / "target", EMBEDDED / "target"))
    pairs = zip(trained.parameters(), embedded.parameters(), strict=True)
    assert 0 < max(float((new - old).detach().abs().max()) for new, old in pairs) < 0.01
    config = AutoConfig.from_pretrained(tmp_path / "target")
    assert config.rope_parameters["factor"] == 32
    assert (tmp_path / "target" / "model.safetensors").stat().st_size > 7e6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert tokenizer.model_max_length == config.max_position_embeddings == 32768
    short, mix = (read_prompts(tmp_path / f"{name}.jsonl") for name in ("short", "mix"))
    heldout = [row for row in mix if row["split"] == "heldout"]
    assert [row for row in short if row["split"] == "heldout"] == heldout
    assert len(short) == len(mix) == 2400 + len(heldout)
    shipped = {row["messages"][0]["content"] for row in read_prompts(EMBEDDED / "prompts.jsonl")}
    asked = defaultdict(list)
    for row in mix:
        content = row["messages"][0]["content"]
        long = row["category"].endswith("k")
        code, question = content.split("```\n\n", 1) if long else ("", content)
        assert question in shipped
        own = question.split("```python\n")[1:]
        assert not any(piece.split("```")[0] in code for piece in own)
        asked[row["split"], row["category"]].append(question)
        if long:
            rendered = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)
            length = len(rendered["input_ids"])
            assert length == pytest.approx(1024 * int(row["category"][:-1]), rel=0.02)
            assert length + 256 < config.max_position_embeddings
    same = {category: questions for (split, category), questions in asked.items() if split == "heldout"}
    assert same == dict.fromkeys(("01k", "02k", "04k", "08k", "16k"), same["01k"])
    assert len(set(same["01k"])) == 32
    assert sum(len(asked["train", category]) for category in same) == 200


def test_without_steps_the_target_is_stretched_alone_and_never_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tools.tiny_long", str(tmp_path), "--steps", "0"])
    main()
    name = "target/model.safetensors"
    assert (tmp_path / name).read_bytes() == (EMBEDDED / name).read_bytes()
    with pytest.raises(SystemExit):
        main()
    assert "target is there already" in capsys.readouterr().err


def test_negative_steps_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tools.tiny_long", str(tmp_path), "--steps", "-1"])
    with pytest.raises(SystemExit):
        main()
    assert "--steps is -1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_attention_in_blocks_is_that_of_transformers():
    ids = torch.randint(0, 3072, (1, 1500), generator=torch.Generator().manual_seed(0))
    expected = load(EMBEDDED / "target", "eager")(input_ids=ids).logits
    model = load(EMBEDDED / "target", "blocks")
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    before = DynamicCache(config=model.config)
    model.model(input_ids=ids[:, :1200], past_key_values=before, use_cache=True)
    rest = model(input_ids=ids[:, 1200:], past_key_values=before, use_cache=True).logits
    torch.testing.assert_close(rest, expected[:, 1200:], atol=1e-4, rtol=1e-4)
    before = DynamicCache(config=model.config)
    model.model(input_ids=ids[:, :300], past_key_values=before, use_cache=True)
    rest = model(input_ids=ids[:, 300:], past_key_values=before, use_cache=True).logits
    torch.testing.assert_close(rest, expected[:, 300:], atol=1e-4, rtol=1e-4)


def test_gradients_of_many_queries_are_those_of_transformers():
    ids = torch.randint(0, 3072, (1, 1100), generator=torch.Generator().manual_seed(0))
    sinks = []
    for attention in ("eager", "blocks"):
        model = load(EMBEDDED / "target", attention)
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        sinks.append(torch.stack([layer.self_attn.sinks.grad for layer in model.model.layers]))
    torch.testing.assert_close(sinks[1], sinks[0], rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_divergence_is_that_of_whole_sequences():
    """Two lengths in a batch and a third alone, behind code that has run once."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "target")
    model = load(EMBEDDED / "target", "eager")
    texts = [
        ("What is x?", "A name."),
        ("Explain y in short.", "It is a number of seconds."),
        ("z", "Nothing is known."),
    ]
    samples = [Sample("chat", "os", prompt, "A plan.", "A detail.", answer) for prompt, answer in texts]
    code = "```python\nx = 1\ny = 2\n```\n\n"
    expected = torch.zeros(())
    for (prompt, answer), sample in zip(texts, samples, strict=True):
        behind = Sample("chat", "os", code + prompt, "A plan.", "A detail.", answer)
        short, long = (encode_sample(s, "medium", tokenizer) for s in (sample, behind))
        teacher_logits, student_logits = (
            model(input_ids=torch.tensor([item.ids])).logits[0, item.prompt_length - 1 : -1].log_softmax(-1)
            for item in (short, long)
        )
        expected += functional.kl_div(student_logits, teacher_logits, reduction="sum", log_target=True)
    blocks = load(EMBEDDED / "target", "blocks")
    found = list(divergences(blocks, blocks, tokenizer, samples, code, "medium"))
    assert len(found) == 2
    assert float(sum(loss for loss, _ in found)) == pytest.approx(float(expected), rel=1e-4)
    assert float(expected) > 0.1


def test_training_brings_the_answers_behind_code_nearer_to_those_without():
    """Every fourth step is without code."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "target")
    student, teacher = (load(EMBEDDED / "target", "blocks") for _ in range(2))
    samples = [Sample("chat", "os", f"What is x{i}?", "A plan.", "A detail.", f"Name number {i}.") for i in range(8)]
    code = "```python\nx = 1\ny = 2\n```\n\n"

    def distance():
        with torch.no_grad():
            return sum(float(loss) for loss, _ in divergences(student, teacher, tokenizer, samples, code, "medium"))

    lengths = []

    def write(length, questions):
        assert set(questions) == {sample.prompt for sample in samples}
        lengths.append(length)
        return code

    before = distance()
    lengthen(student, teacher, tokenizer, samples, write, 8)
    assert distance() < 0.5 * before
    assert lengths == [1024, 4096, 2048, 16384, 4096, 8192]
    with torch.no_grad():
        again = load(EMBEDDED / "target", "blocks")
        assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), again.parameters(), strict=True))
