"""Traffic from a file: what a client would send, or an error with file and line before a server starts."""

import json

import pytest

from drafthead.adapting.control import Control, folder, read_traffic
from drafthead.artifacts import begin, finish
from tests.engine.replying import replying
from tests.recipes import tiny_recipe
from tests.scripts import run_here


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


def test_a_rate_of_nothing_is_refused_by_its_name(tmp_path, capsys):
    assert run_here("data_gen/adapt.py", f"output_dir={tmp_path}", "--rate", "0") == 1
    assert "--rate 0" in capsys.readouterr().err


def test_traffic_of_which_nothing_is_answered_is_an_error(tmp_path, capsys):
    recipe = tiny_recipe(tmp_path)
    begin(recipe.head_dir, "head", {"target": {}})
    finish(recipe.head_dir, {})
    folder(recipe).mkdir(parents=True)
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}')
    with replying(lambda: json.dumps({"head": str(recipe.head_dir)})) as url:  # and to a prompt nothing that counts
        (folder(recipe) / "server.json").write_text(json.dumps({"url": url, "api_key": "a", "key": "b"}))
        flags = ("--traffic", str(tmp_path / "t.jsonl"), "--rate", "100")
        assert run_here("data_gen/adapt.py", f"output_dir={tmp_path}", *flags) == 1
    assert "0 of 1" in capsys.readouterr().out


@pytest.mark.parametrize(("content", "ours"), [("<html>", False), ("[]", False), ("7", False), ('{"head": "a"}', True)])
def test_another_service_at_the_port_of_a_killed_server_is_not_taken_for_it(content, ours, tmp_path):
    recipe = tiny_recipe(tmp_path)
    folder(recipe).mkdir(parents=True)
    with replying(lambda: content) as url:
        (folder(recipe) / "server.json").write_text(json.dumps({"url": url, "api_key": "a", "key": "b"}))
        assert (Control.running(recipe) is not None) == ours
