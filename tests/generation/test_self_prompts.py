"""Prompts that the target writes itself, by the script, on the embedded target."""

import copy
import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from drafthead.artifacts import read_manifest
from drafthead.data.prompts import read_prompts
from drafthead.generation.self_prompts import SAMPLES_PER_PART, user_turn
from tests.recipes import tiny_recipe
from tests.scripts import start, wait_for
from tests.warm import run_warm, warm

SCRIPT = "data_gen/self_prompts.py"
NUMBER = SAMPLES_PER_PART  # more than come of one part: some samples are always dropped
SETTINGS = ("target.dtype=bfloat16", "prompts.date=2026-01-01")


def folder(output_dir: Path) -> Path:
    return output_dir / "data" / "tiny" / "self-prompts"


def texts(output_dir: Path) -> list[str]:
    rows = map(json.loads, (folder(output_dir) / "prompts.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["messages"][0]["content"] for row in rows]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run that nothing disturbed."""
    output_dir = tmp_path_factory.mktemp("written")
    run_warm(SCRIPT, "--number", str(NUMBER), f"output_dir={output_dir}", *SETTINGS)
    return output_dir


def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


@pytest.mark.slow
def test_as_many_different_prompts_as_wanted_come_of_samples_that_are_all_accounted_for(written):
    counts = read_manifest(folder(written))["counts"]
    assert counts["prompts"] == NUMBER == len(texts(written))
    assert counts["samples"] == counts["usable"] + sum(counts["dropped"].values())
    assert counts["samples"] > NUMBER
    assert max(Counter(" ".join(text.casefold().split()) for text in texts(written)).values()) == 1
    assert not any("<|" in text or text != text.strip() or not text for text in texts(written))


@pytest.mark.slow
def test_a_killed_command_continues_and_the_prompts_are_those_of_an_undisturbed_one(written, tmp_path):
    log, part = tmp_path / "log", folder(tmp_path) / "part-00000.jsonl"
    arguments = ("--number", str(NUMBER), f"output_dir={tmp_path}", *SETTINGS)
    with log.open("w") as file:
        process = start(SCRIPT, *arguments, stdout=file, stderr=file, start_new_session=True)
    wait_for(part.exists, log, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder(tmp_path) / "manifest.json").exists()
    before = part.stat().st_mtime_ns
    run_warm(SCRIPT, *arguments)
    assert part.stat().st_mtime_ns == before
    assert (folder(tmp_path) / "prompts.jsonl").read_bytes() == (folder(written) / "prompts.jsonl").read_bytes()


@pytest.mark.slow
def test_another_number_is_made_from_the_samples_that_are_there(written, tmp_path):
    output_dir = copied(written, tmp_path)
    parts = {path: path.stat().st_mtime_ns for path in folder(output_dir).glob("part-*")}
    run_warm(SCRIPT, "--number", "10", f"output_dir={output_dir}", *SETTINGS)
    assert texts(output_dir) == texts(written)[:10]
    assert {path: path.stat().st_mtime_ns for path in folder(output_dir).glob("part-*")} == parts
    assert len(parts) == 2


@pytest.mark.slow
def test_repeated_cut_and_empty_samples_and_control_tokens_are_dropped(written, tmp_path):
    output_dir = copied(written, tmp_path)
    (folder(output_dir) / "manifest.json").unlink()
    first, second = sorted(folder(output_dir).glob("part-*"))
    samples = [json.loads(line) for line in first.read_text().splitlines()]
    ended = next(s for s in samples if s["finish_reason"] == "stop" and len(s["token_ids"]) > 8)
    *body, end = ended["token_ids"]
    bad = [
        ended,  # a duplicate
        {"token_ids": body, "finish_reason": "length"},
        {"token_ids": [end], "finish_reason": "stop"},
        {"token_ids": [*body, end, *body, end], "finish_reason": "stop"},
    ]
    second.write_text("".join(json.dumps(sample) + "\n" for sample in bad))
    run_warm(SCRIPT, "--number", "10", f"output_dir={output_dir}", *SETTINGS)
    before = read_manifest(folder(output_dir))["counts"]
    assert before["samples"] == SAMPLES_PER_PART  # the second part is not needed for ten
    result = warm().run(SCRIPT, "--number", str(NUMBER), f"output_dir={output_dir}", *SETTINGS)
    assert result.returncode == 1  # of a part of four samples nothing usable came
    dropped = {"duplicate": 1, "cut": 1, "empty": 1, "control token": 1}
    for reason, count in dropped.items():
        assert f"'{reason}': {before['dropped'].get(reason, 0) + count}" in result.stderr


@pytest.mark.slow
def test_nothing_of_them_is_ever_held_out(written, tmp_path):
    path = folder(written) / "prompts.jsonl"
    ours = "{name: ours, path: data_gen/tiny/prompts.jsonl, heldout: 4}"
    for heldout, code in ((1, 1), (0, 0)):
        listed = f"[{{name: self, path: {path}, train: 40, heldout: {heldout}}}, {ours}]"
        options = ("prompts.path=null", "prompts.max_train=null", f"prompts.sources={listed}", "prompts.validation=4")
        result = warm().run("data_gen/prompts.py", f"output_dir={tmp_path}", *options)
        assert result.returncode == code, result.stderr
    recipe = tiny_recipe(tmp_path)
    assert {p.category for p in read_prompts(recipe.prompts_dir, "train")} == {"self"}
    assert "self" not in {p.category for p in read_prompts(recipe.prompts_dir, "heldout")}


TEMPLATE = (
    "{{ '<|start|>system<|message|>Be kind.<|end|>' }}{% for m in messages %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content | trim + '<|end|>' }}{% endfor %}"
)


def test_the_beginning_of_a_turn_and_its_end_are_those_of_the_template(tmp_path, tokenizer):
    recipe, other = tiny_recipe(tmp_path), copy.deepcopy(tokenizer)
    other.chat_template = TEMPLATE
    turn = user_turn(recipe, other, None)
    assert other.decode(list(turn.prefix_ids)) == "<|start|>system<|message|>Be kind.<|end|><|start|>user<|message|>"
    assert other.convert_ids_to_tokens(turn.end_id) == "<|end|>"


@pytest.mark.parametrize("template", ["{{ messages[0].content }}<|end|>", "user: {{ messages[0].content }}\n", "hello"])
def test_a_template_without_a_place_for_the_user_is_refused(template, tmp_path, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    with pytest.raises(ValueError, match="chat template"):
        user_turn(tiny_recipe(tmp_path), other, None)
