"""What users and their machines get wrong ends every command in one message: which file, what is wrong, what to do."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rich.markdown import Markdown
from safetensors.torch import load_file, save_file

from drafthead.config import REPO_ROOT, load_recipe
from drafthead.data.prompts import read_prompts
from drafthead.files import in_markdown
from drafthead.progress import terminal
from tests.damage import cut_short, edit_config, replace_tensors
from tests.recipes import SMALL_HEAD
from tests.scripts import environment, run_here

PROMPTS, HARVEST, REGENERATE = "data_gen/prompts.py", "data_gen/harvest.py", "data_gen/regenerate.py"
EXPORT, IMPORT = "export/head.py", "export/import_head.py"
LONG = "a" * 300
GOOD = [
    {"split": split, "messages": [{"role": "user", "content": f"question {i} of {split}"}]}
    for split in ("train", "heldout")
    for i in range(3)
]
_ACTION = r"; \w|\. [A-Z]|: give|not valid:|correct or remove|must be"


def refused(capsys: pytest.CaptureFixture, script: str, *arguments: str) -> str:
    """Run a command that must end with code 1; a traceback would end the test. Returns its message."""
    capsys.readouterr()
    assert run_here(script, *arguments) == 1
    message = capsys.readouterr().err.strip().split("\n\n")[-1]
    assert "Traceback" not in message
    assert re.search(_ACTION, message), f"no next action: {message}"
    return message


def lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def prompts_of(folder: Path, content: bytes = lines(GOOD), name: str = "p.jsonl") -> list[str]:
    """Overrides of a recipe that reads a file with this content."""
    path = folder / name
    path.write_bytes(content)
    return [
        f"output_dir={folder}", f"prompts.path={path}", "prompts.max_train=null", "prompts.max_heldout=null",
        "prompts.validation=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (f"train.seed={2**64}", "train.seed"),
        (f"name={LONG}", "name"),
        (f"output_dir=/tmp/{LONG}", "output_dir"),
        (f"prompts.path=/tmp/{LONG}", LONG),
        ("output_dir=/proc/nothing", "/proc/nothing"),
        ("output_dir=/dev/null/x", "/dev/null"),
        ("train.learning_rate=.nan", "train.learning_rate"),
        (f"prompts.validation={2**70}", "prompts.validation"),
    ],
)
def test_a_setting(tmp_path, capsys, override, named):
    assert named in refused(capsys, PROMPTS, *prompts_of(tmp_path), override)


def test_a_recipe_whose_name_is_too_long(capsys):
    assert LONG in refused(capsys, PROMPTS, LONG)


def parquet(damage: Callable[[bytearray], Any]) -> bytes:
    content = bytearray(pd.DataFrame({"prompt": ["a", "b", "c"]}).to_parquet())
    damage(content)
    return bytes(content)


NOISE = bytes(range(256)) * 8


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"p.{kind}", NOISE) for kind in ("parquet", "csv", "json", "jsonl.gz", "txt")),
        *((f"p.{kind}", b"") for kind in ("parquet", "csv", "json", "jsonl.gz")),
        ("p.parquet", parquet(lambda content: content.__delitem__(slice(-50, None)))),
        ("p.parquet", parquet(lambda content: content.__setitem__(30, content[30] ^ 255))),
        ("p.csv", "prompt\nm\xfcll\n".encode("latin1")),
        ("p.jsonl", b"\x1e".join(json.dumps(row).encode() for row in GOOD)),
    ],
)
def test_a_file_of_prompts(tmp_path, capsys, name, content):
    message = refused(capsys, PROMPTS, *prompts_of(tmp_path, content, name))
    assert str(tmp_path / name) in message or not content  # of a file without rows its source is named


def line_of(content: Any, role: Any = "user", **more: Any) -> bytes:
    return json.dumps({"split": "train", "messages": [{"role": role, "content": content}], **more}).encode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (line_of("\ud800"), "Unicode"),
        (line_of("x", source="\udfff"), "Unicode"),
        (b'{"messages": "\xed\xa0\x80"}', "JSON"),
        (line_of("hello").decode().encode("utf-16"), "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"split": "train", "prompt_ids": [' + b"9" * 5000 + b"]}", "JSON"),
        (b'{"split": "train", "prompt_ids": [4294967296]}', "token ids"),
        (line_of(""), "user"),
        (line_of(float("nan")), "not text"),
        (line_of("x", "narrator"), "narrator"),
        (line_of("x", ["user"]), r"\['user'\]"),
        (b'{"split": "train", "messages": [7]}', "not an object"),
        (b'{"split": "train", "messages": {"role": "user"}}', "messages"),
        (b'{"prompt": ', "not JSON in UTF-8"),
        (b"[1]", r"found \[1\]"),
        (b'{"prompt": "a", "split": "test"}', "split is 'test'"),
        (b'{"prompt": "a", "tools": ["f"]}', "tools must be"),
        (b'{"question": "a", "text": "b"}', "text would not be read"),
        (b'{"prompt_ids": [1], "system": "b"}', "system would not be read"),
        (b'{"promt": "a"}', "unknown key promt; known: .*messages"),
        (b'{"turns": 3}', "no turns"),
        (b'{"messages": [{"role": "user", "text": "x"}]}', "'text'"),
        (b'{"messages": [{"role": "user", "content": "x", "wieght": 0}]}', "'wieght'"),
        (line_of("x", weight=0), "unknown key weight"),
        (b'{"messages": [{"role": "user", "content": "x"}, {"role": "gpt", "content": "y", "train": "no"}]}', "train"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": null, '
            b'"tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": "}}]}]}',
            "arguments",
        ),
        (b'{"chosen": [{"role": "user", "content": "x"}], "rejected": []}', "chosen"),
        (b'{"prompt": "a", "completion": "b", "response": "c"}', "response would not be read"),
        (b'{"choices": [{"message": {"role": "assistant", "content": "y"}}], "usage": {}}', "messages"),
        (b'{"custom_id": "1", "response": {"status_code": 200, "body": {"choices": []}}, "error": null}', "custom_id"),
        (b'{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "choices": [{"text": "y"}]}', r"choices\[0\]\.message"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], '
            b'"choices": [{"message": {"content": "z"}}]}',
            r"choices\[0\]",
        ),
        (b'{"id": "x"}', "no column prompt"),
        (b'{"prompt": "a", "response_ids": [4]}', "response_ids without prompt_ids"),
        (b'{"prompt_ids": [4], "response_ids": []}', "token ids must be a non-empty list"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_and_can_be_mended(tmp_path, capsys, line, message):
    arguments = prompts_of(tmp_path, lines(GOOD) + line + b"\n")
    assert re.search(r"p\.jsonl:7: .*" + message, refused(capsys, PROMPTS, *arguments))
    assert not (tmp_path / "data").exists()  # so that the mended file is read by the same command
    assert run_here(PROMPTS, *prompts_of(tmp_path, lines(GOOD) + line_of("mended"))) == 0


def test_what_is_unusual_and_text_all_the_same_is_kept(tmp_path):
    texts = ["a\0b", "line\rend\u2028\x85", "word " * 210_000, "\ufeff\u202e\U0010ffff"]
    arguments = prompts_of(tmp_path, lines(GOOD) + b"\n".join(map(line_of, texts)))
    assert run_here(PROMPTS, *arguments) == 0
    folder = load_recipe(overrides=arguments).prompts_dir
    contents = {p.messages[0]["content"] for split in ("train", "validation") for p in read_prompts(folder, split)}
    assert set(texts) <= contents


# What a target can have that is another's or no one's, and the file that the message names.


def text(name: str, content: str | bytes) -> Callable[[Path], Any]:
    return lambda target: (target / name).write_bytes(content.encode() if isinstance(content, str) else content)


def config(**changes: Any) -> Callable[[Path], Any]:
    return lambda target: edit_config(target, **changes)


INDEX = "model.safetensors.index.json"
SHAPES = [
    *(text("config.json", content) for content in ("[1, 2]", '"x"', "", "null", b"\xff\xfe", '{"text_config": [1]}')),
    *(config(num_hidden_layers=value) for value in ("many", -1, 2.5)),
    *(config(hidden_size=value) for value in (0, [1])),
    *(config(**{key: "x"}) for key in ("vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters")),
    config(dtype="float7"),
    config(model_type=7),
]


@pytest.mark.parametrize("damage", SHAPES)
def test_a_target_that_describes_something_else(tmp_path, capsys, target, damage):
    damage(target)
    message = refused(capsys, HARVEST, "--dry-run", *prompts_of(tmp_path), f"target.path={target}")
    assert str(target) in message


def other_norm(target: Path) -> None:
    replace_tensors(target / "model.safetensors", {"model.norm.weight": torch.ones(10)})


WEIGHTS = [
    lambda target: cut_short(target / "model.safetensors", 100_000),
    text("model.safetensors", pickle.dumps({"weights": 1})),
    lambda target: torch.save({"weights": torch.zeros(3)}, target / "model.safetensors"),
    text("model.safetensors", b""), text("model.safetensors", b"\xff" * 8 + b"{}"), other_norm, config(vocab_size=100),
    config(hidden_size=64),
    *(text(INDEX, content) for content in ("[]", "{", "{}", '{"weight_map": [1]}')),
    *(text(INDEX, json.dumps({"weight_map": {"model.norm.weight": name}})) for name in (7, "../../x", "gone")),
]  # fmt: skip


@pytest.mark.parametrize("damage", WEIGHTS)
def test_weights_of_a_target(tmp_path, capsys, target, head, damage):
    weights = load_file(head / "model.safetensors")
    theirs = shutil.copytree(head, tmp_path / "head")
    del weights["lm_head.weight"]  # is taken from the target then
    save_file(weights, theirs / "model.safetensors")
    damage(target)
    arguments = (*SMALL_HEAD, f"output_dir={tmp_path}", f"target.path={target}")
    message = refused(capsys, IMPORT, *arguments, "--head", str(theirs))
    assert str(target) in message or "give the target that this head was trained for" in message


TOKENIZERS = [
    *(text("tokenizer.json", content) for content in ("", "[]", b"\xff\xff", '{"version": "1.0"}')),
    lambda target: (target / "tokenizer.json").unlink(),
    *(text("tokenizer_config.json", content) for content in ("[]", "{", '{"tokenizer_class": 7}')),
    text("chat_template.jinja", b"\xff\xff"),
]


def test_a_variable_that_the_chat_template_does_not_read(tmp_path, capsys, target):
    arguments = [*prompts_of(tmp_path), f"target.path={target}"]
    assert run_here(PROMPTS, *arguments) == 0
    for name, why in (("enable_thinkng", "does not read"), ("reasoning_effort", "responses.reasoning_efforts")):
        message = refused(capsys, REGENERATE, *arguments, f"target.chat_template_kwargs={{{name}: false}}")
        assert name in message
        assert why in " ".join(message.split())


@pytest.mark.parametrize("damage", TOKENIZERS)
def test_a_tokenizer(tmp_path, capsys, target, damage):
    arguments = [*prompts_of(tmp_path), f"target.path={target}"]
    assert run_here(PROMPTS, *arguments) == 0
    damage(target)
    assert str(target) in refused(capsys, REGENERATE, *arguments)


# Names


ODD = ["[/x]", "[red]x", "<script>x</script>", "|", "a|b", "# x", "*x*", "_x_", "`x`", "[x](http://y)", "$x$", "&lt;"]


@pytest.mark.parametrize("name", ODD)
def test_a_name_is_shown_as_it_is(capsys, name):
    capsys.readouterr()
    terminal().print(name)
    assert capsys.readouterr().out.strip() == name
    terminal().print(Markdown(f"- {in_markdown(name)}"))
    assert capsys.readouterr().out.strip() == f"• {name}"
    assert "<script>" not in in_markdown(name)


CONTROLS = ["\x1b[31mred", "a\nb", "a\r\u202eb", "x" * 3000, "{{ 7 * 7 }}", "../../escaped", "/etc"]


@pytest.mark.parametrize("categories", [ODD, CONTROLS])
def test_a_category_and_a_source_are_only_names(tmp_path, capsys, categories):
    (tmp_path / "inside").mkdir()
    rows = [
        {"split": split, "messages": [{"role": "user", "content": f"{split} {i}"}], "category": name, "source": name}
        for split in ("train", "heldout")
        for i, name in enumerate(2 * categories)
    ]
    assert run_here(PROMPTS, *prompts_of(tmp_path / "inside", lines(rows))) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\r", "\u202e"} & set(printed)
    assert all(name in printed for name in categories if name in ODD)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]


def test_a_folder_may_be_called_anything(tmp_path):
    folder = tmp_path.joinpath("[", "x]", "[bold red]", "a b", "a'b\"", "*", "{a}", "$HOME", "é")
    folder.mkdir(parents=True)
    arguments = prompts_of(folder)
    assert run_here(PROMPTS, *arguments) == 0
    assert run_here(HARVEST, "--dry-run", *arguments) == 0


# The machine


def shell(command: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a line of the shell, without a traceback; $PYTHON stands in it for this interpreter."""
    result = subprocess.run(
        ["bash", "-c", command], cwd=REPO_ROOT, capture_output=True, check=False, timeout=300,
        env=environment(PYTHON=sys.executable, **variables),
    )  # fmt: skip
    assert b"Traceback" not in result.stderr, result.stderr
    return result


@pytest.mark.parametrize(
    ("ending", "code", "named"), [("", 0, ""), (">&- 2>&-", 0, ""), (">/dev/full", 1, "standard output")]
)
def test_standard_output_is_closed_or_full_or_plain(tmp_path, ending, code, named):
    """In a locale without UTF-8, with room for few open files."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    arguments = " ".join(prompts_of(tmp_path, lines([{**row, "category": "é – \U0001f600"} for row in GOOD])))
    result = shell(f"ulimit -n 40; $PYTHON {PROMPTS} {arguments} {ending}", **plain)
    assert result.returncode == code, result.stderr
    assert b"Exception ignored" not in result.stderr
    assert named.encode() in result.stderr
    assert (tmp_path / "data" / "tiny" / "prompts" / "manifest.json").exists()


def test_files_that_may_not_grow(tmp_path):
    arguments = " ".join(prompts_of(tmp_path))
    result = shell(f"trap '' XFSZ; ulimit -f 0; $PYTHON {PROMPTS} {arguments}")
    assert result.returncode == 1, result.stderr
    assert b"Make room" in result.stderr
    assert run_here(PROMPTS, *prompts_of(tmp_path)) == 0


def test_a_file_system_that_is_read_only(tmp_path):
    (tmp_path / "ro").mkdir()
    command = f"mount -t tmpfs -o ro none {tmp_path}/ro && $PYTHON {PROMPTS} {' '.join(prompts_of(tmp_path))}"
    result = shell(f"unshare --user --map-root-user --mount sh -c '{command} output_dir={tmp_path}/ro || exit $?'")
    if b"unshare" in result.stderr or b"mount:" in result.stderr:
        pytest.skip("needs a user namespace in which a tmpfs can be mounted")
    assert result.returncode == 1, result.stderr
    assert os.fsencode(tmp_path / "ro") in result.stderr
    assert b"output_dir" in result.stderr
