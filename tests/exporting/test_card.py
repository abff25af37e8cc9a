"""The model card says what manifests say and no more; nothing is uploaded unless asked, nor public by default."""

from math import nan
from types import SimpleNamespace
from unittest.mock import create_autospec

import huggingface_hub
import pytest

from drafthead import artifacts
from drafthead.artifacts import ArtifactError
from drafthead.engine.offline import engine_arguments
from drafthead.evaluation.workload import EvalPrompt, Workload, identity
from drafthead.exporting.card import push_head, response_source, write_card
from drafthead.exporting.export import export_head
from drafthead.exporting.importing import import_head
from drafthead.statistics import Interval
from tests.exporting.runs import recipe_at, write_run


@pytest.fixture
def head(tmp_path):
    """A head that was imported, so that nothing about its training is known."""
    first = recipe_at(tmp_path / "first")
    write_run(first)
    recipe = recipe_at(tmp_path / "second")
    import_head(recipe, str(export_head(first, serve_check=False)))
    export_head(recipe, serve_check=False)
    return recipe


_COLUMNS = ("category", "K", "temperature", "effort", "prompts", "length")
_ROWS = (
    ("all", 3, 0.7, "medium", 147, Interval(2.694, 2.62, 2.77)),
    ("a|b <img>\nc", 5, 0.7, "medium", 9, Interval(1.5, 1.4, 1.6)),
    ("all", 3, 0, "high", 147, Interval(2.8, 2.7, 2.9)),
    ("one", 3, 0.7, "medium", 1, Interval(2.31, nan, nan)),
    ("none", 3, 0.7, "medium", 0, Interval(nan, nan, nan)),
)


@pytest.fixture
def api(monkeypatch):
    """The hub's client with its real signatures and no network."""
    client = create_autospec(huggingface_hub.HfApi, instance=True)
    client.upload_folder.return_value.commit_url = "https://hub/commit/1"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: client)
    return client


def test_a_card_names_what_is_known_and_what_is_not(head):
    text = write_card(head).read_text()
    for part in (
        "eagle3", "tiny: an EAGLE-3 draft head for data_gen/tiny/target", "what it was trained on is not known here",
        "exported without starting an engine", "It has not been measured on held-out prompts",
        "aux layers [2, 4, 6]", "eagle3_layers_to_capture: [1, 3, 5]", "to [1, 3, 5]", "None has been stated",
        """'{"method":"eagle3","model":"heads/tiny","num_speculative_tokens":3}'""", "--speculative-num-draft-tokens 4",
    ):  # fmt: skip
        assert part in text, f"{part!r} is not in\n{text}"
    assert "None" not in text.replace("None has been stated", "")


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_what_the_chat_template_was_told_is_on_the_card_and_in_the_command(tmp_path, target, layout):
    (target / "chat_template.jinja").open("a").write("{# enable_thinking #}")
    told = "target.chat_template_kwargs={enable_thinking: false}"
    first = recipe_at(tmp_path / "first")
    write_run(first)
    options = f"target.path={target}", f"export.format={layout}"
    recipe = recipe_at(tmp_path / "second", told, *options)
    import_head(recipe, str(export_head(first, serve_check=False)))
    export_head(recipe, serve_check=False)
    card, quoted = write_card(recipe).read_text(), '{"enable_thinking": false}'
    assert f"--default-chat-template-kwargs '{quoted}'" in card
    assert f"`{quoted}`" in card
    with pytest.raises(ArtifactError, match="enable_thinking"):
        identity(
            recipe_at(tmp_path / "second", *options), Workload([EvalPrompt("a", "chat", [1])], 0), ("none", "head")
        )


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_a_head_in_either_layout_is_served_with_the_flags_that_it_needs(tmp_path, layout):
    """Two layers like the target's, which vLLM would put into several groups of cache."""
    deep = ("head.num_layers=2", "head.num_attention_heads=8", "head.num_key_value_heads=2", "head.head_dim=32")
    first = recipe_at(tmp_path / "first", *deep)
    write_run(first)
    recipe = recipe_at(tmp_path / "second", *deep, f"export.format={layout}")
    import_head(recipe, str(export_head(first, serve_check=False)))
    directory = str(export_head(recipe, serve_check=False))
    arguments = {"model": directory} if layout == "speculators" else {"speculative_config": {"model": directory}}
    assert engine_arguments(recipe, **arguments)["disable_hybrid_kv_cache_manager"]
    assert "--disable-hybrid-kv-cache-manager" in write_card(recipe).read_text()


def test_results_and_licence_appear_without_touching_the_artifact(head, tmp_path):
    before = (head.head_dir / artifacts.MANIFEST).read_bytes()
    licensed = recipe_at(tmp_path / "second", "export.license=apache-2.0")
    export_head(licensed, serve_check=False)
    rows = [SimpleNamespace(**dict(zip(_COLUMNS, row, strict=True))) for row in _ROWS]
    text = write_card(licensed, {"max_tokens": 192, "rows": rows}, "me/head").read_text()
    for row in (
        "all, reasoning effort medium | 3 | 0.7 | 147 | 2.69 [2.62, 2.77]",
        "a\\|b &lt;img> c, reasoning effort medium | 5 | 0.7 | 9 | 1.50 [1.40, 1.60] (n = 9, too few)",
        "all, reasoning effort high | 3 | 0 | 147 | 2.80 [2.70, 2.90]",
        "one, reasoning effort medium | 3 | 0.7 | 1 | 2.31 (n = 1, too few)",
    ):
        assert f"| measured on held-out prompts: {row} |" in text
    assert "nothing but its files has been checked" not in text  # vLLM has served it
    assert text.count("held-out prompts:") == 4
    assert 'license: "apache-2.0"' in text
    assert '"model":"me/head"' in text
    assert (head.head_dir / artifacts.MANIFEST).read_bytes() == before
    assert not artifacts.verify_files(head.head_dir)


def test_a_push_is_private_and_holds_three_files(head, api):
    write_card(head)
    assert push_head(head.head_dir, "me/head") == "https://hub/commit/1"
    api.create_repo.assert_called_once_with("me/head", private=True, exist_ok=True)
    patterns = api.upload_folder.call_args.kwargs["allow_patterns"]
    assert patterns == ["config.json", "model.safetensors", "README.md"]
    push_head(head.head_dir, "me/head", public=True)
    assert api.create_repo.call_args.kwargs["private"] is False


def test_a_damaged_or_unservable_head_is_not_pushed(head, api, tmp_path):
    local = recipe_at(tmp_path / "second", "export.format=speculators")
    with pytest.raises(ValueError, match="target.path"):
        push_head(export_head(local, serve_check=False), "me/head")
    (head.head_dir / "config.json").write_text("{}")
    with pytest.raises(artifacts.ArtifactError, match=r"(lost|changed).*config.json"):
        push_head(head.head_dir, "me/head")
    with pytest.raises(artifacts.ArtifactError, match="python export/head.py"):
        push_head(tmp_path / "nothing", "me/head")
    assert not api.mock_calls


def test_where_the_responses_came_from():
    weighted = {"regenerate": True, "temperature": {"0.0": 1, "1.0": 3}}
    assert response_source(weighted).endswith("temperature 0.0 (1), 1.0 (3) by weight")
    assert "not the target's own" in response_source({"regenerate": False, "temperature": 1.0})
