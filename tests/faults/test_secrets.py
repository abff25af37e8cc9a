"""Tokens and keys reach no manifest, log, card or error message.

The same is looked for in a run with a tracker (tests/training/test_options.py) and in what a real server and its load
leave behind (tests/engine/test_server.py).
"""

import pytest

from drafthead.config import DEFAULT_RECIPE, load_recipe
from drafthead.engine.server import server_command
from drafthead.exporting.card import write_card
from drafthead.exporting.export import export_head
from drafthead.exporting.importing import import_head
from tests.exporting.runs import recipe_at, write_run
from tests.faults.secrets import MARKER, files_with, set_secrets
from tests.generation.small import SMALL
from tests.scripts import run_here


def test_stages_write_down_nothing_of_the_environment(tmp_path, monkeypatch, capsys):
    set_secrets(monkeypatch)
    first, recipe = recipe_at(tmp_path / "first"), recipe_at(tmp_path)
    write_run(first)
    import_head(recipe, str(export_head(first, serve_check=False)))
    export_head(recipe, serve_check=False)
    write_card(recipe)
    assert run_here("data_gen/prompts.py", f"output_dir={tmp_path}", *SMALL) == 0
    assert MARKER not in "".join(capsys.readouterr())
    assert not files_with(tmp_path, MARKER)
    assert files_with(tmp_path, "data_gen/prompts.py") == []  # the search itself: the command is there by its name
    assert files_with(tmp_path, '"prompts.py"')
    assert MARKER not in " ".join(server_command(recipe, 1234))


def test_a_recipe_cannot_ask_for_the_environment(tmp_path, monkeypatch):
    set_secrets(monkeypatch)
    path, asks = tmp_path / "asks.yaml", "${oc.env:HF_TOKEN}"
    path.write_text(DEFAULT_RECIPE.read_text().replace("eval:\n", f"export:\n  license: {asks}\n\neval:\n"))
    assert load_recipe(path).export.license == asks  # as it stands there
    with pytest.raises(ValueError, match="export.license") as caught:
        load_recipe(overrides=[f"export.license={asks}"])
    assert MARKER not in str(caught.value)


@pytest.mark.parametrize(
    "url", [f"https://me:{MARKER}@host", f"https://{MARKER}@host/", f"http://host?key={MARKER}", f"http://[{MARKER}@h"]
)
def test_a_key_in_a_url_is_refused_and_not_repeated(url):
    with pytest.raises(ValueError, match="api_key_env") as caught:
        load_recipe(overrides=[f"eval.endpoints=[{{name: a, model: m, url: '{url}'}}]"])
    assert MARKER not in str(caught.value)
