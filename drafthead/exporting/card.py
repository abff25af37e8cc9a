"""The model card: README.md of a head, written from manifests alone; and the upload of a head with its card.

The card is no part of the artifact: results that come later appear in it without changing what they were measured on,
so it is written after the manifest and again by every export of the same head. Nothing is uploaded unless requested,
nor public unless requested.
"""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import pyarrow.parquet as pq

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data.prompts import noted_prompts
from drafthead.data.responses import prompt_of, read_categories
from drafthead.drafters.registry import drafter_of, parse_head
from drafthead.engine.offline import needs_one_cache_group
from drafthead.files import atomic_path, in_markdown
from drafthead.statistics import few

CARD = "README.md"
_UPLOADED = ("config.json", "model.safetensors", CARD)


def write_card(recipe: Recipe, measured: Any = None, published_as: str | None = None) -> Path:
    """Write the card of the recipe's exported head.

    Args:
        recipe: recipe of the head and of the run that it was exported from.
        measured: `rows` of evaluation's summary of acceptance with this very head, and `max_tokens`, if there are any.
        published_as: hub id for the serving commands, instead of the directory.

    Raises:
        ArtifactError: the head is missing or half finished.
    """
    manifest = artifacts.require(recipe.head_dir, "head", "python export/head.py RECIPE")
    files = drafter_of(recipe.head).vllm
    package = Path(__file__).parents[1]
    folders = [package / "exporting" / "templates", package / "drafters" / files.TYPE / "templates"]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"plain": in_markdown, "few": few}
    run_dir = recipe.run_dir
    run = artifacts.read_json(run_dir / artifacts.IDENTITY)
    config = artifacts.read_json(recipe.head_dir / "config.json")
    directory, served = published_as or f"heads/{recipe.head_dir.name}", files.served_values(config)
    speculative = files.speculative_config(directory, manifest["identity"]["num_draft_tokens"])
    template_kwargs = manifest["identity"]["target"].get("chat_template_kwargs")
    facts = {
        **manifest,
        "template_flag": f" --default-chat-template-kwargs {shlex.quote(json.dumps(template_kwargs))}"
        if template_kwargs
        else "",
        "name": recipe.name,
        "dtype": config["dtype"],
        "directory": directory,
        "is_hub": not Path(recipe.target_path).exists(),
        "licence": recipe.export.license,
        "algorithm": files.ALGORITHM,
        "method": files.METHOD,
        "speculative": json.dumps(speculative, separators=(",", ":")),
        "one_cache_group": needs_one_cache_group(recipe, str(recipe.head_dir)),
        "positions": served["max_position_embeddings"],
        "draft_vocab_size": served["draft_vocab_size"],
        "published": published_as is not None,
        "positions_trained": parse_head(run["head"]).num_positions,
        "run": run,
        "norms": ", ".join(name for name, on in run["head"].items() if "norm" in name and on) or "no optional norm",
        "ancestors": _ancestors(run),
        "blocks": [layer_id - 1 for layer_id in run["aux_layer_ids"]],
        "trained": artifacts.read_manifest(run_dir)["counts"] if (run_dir / artifacts.MANIFEST).exists() else {},
        "data": None if "imported" in run else _data(recipe, manifest["identity"]["step"]),
        "measured": measured,
    }
    text = environment.get_template("card.md.jinja").render(facts)
    path = recipe.head_dir / CARD
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return path


def push_head(directory: Path, repo: str, public: bool = False) -> str:
    """Upload the files an engine reads and the card to the Hugging Face hub; manifests hold local paths and stay here.

    Args:
        directory: directory of a finished head.
        repo: owner/name; created if it does not exist. The visibility of one that exists is left as it is.
        public: whether a new repository is public.

    Returns:
        Address of the commit.

    Raises:
        ArtifactError: the head is not finished or its files have changed since.
        ValueError: the head names its target by a local path, which no other machine has.
    """
    from huggingface_hub import HfApi

    artifacts.require(directory, "head", "python export/head.py RECIPE", every_byte=True)
    config = artifacts.read_json(directory / "config.json")
    target = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    if target and Path(target).exists():
        raise ValueError(f"{directory} names its target by a local path; give target.path a hub id and export again")
    api = HfApi()
    api.create_repo(repo, private=not public, exist_ok=True)
    commit = api.upload_folder(repo_id=repo, folder_path=directory, allow_patterns=list(_UPLOADED))
    return commit.commit_url


def _ancestors(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What the run's weights began with, what that began with, and so on."""
    ancestors = []
    while run := run.get("started_from") or {}:
        ancestors.append(run)
    return ancestors


def _data(recipe: Recipe, step: int) -> dict[str, Any] | None:
    """Counts and mix of what was trained on; None where the data has been moved away or the run is still going."""
    directory, prompts = recipe.responses_dir("train"), recipe.prompts_dir / "train.parquet"
    responses, run = directory / artifacts.MANIFEST, recipe.run_dir / artifacts.MANIFEST
    if not all(path.exists() for path in (responses, prompts.with_name(artifacts.MANIFEST), run)):
        return None
    run_manifest, manifest = artifacts.read_json(run), artifacts.read_json(responses)
    if manifest["identity"]["prompts"] != artifacts.reference(artifacts.read_manifest(recipe.prompts_dir)):
        return None  # drawn anew since
    noted, answered = noted_prompts(recipe.run_dir), {prompt_of(name) for name in read_categories(directory)}
    if noted is not None and not answered <= noted:
        return None  # and answered anew
    rows = pq.read_table(prompts, columns=["id", "source", "category"]).to_pylist()
    mix = Counter((row["source"], row["category"]) for row in rows if row["id"] in answered)
    epochs = run_manifest["identity"]["train"]["epochs"] * step / run_manifest["counts"]["total_steps"]
    return {
        **manifest["counts"],
        "source": response_source(manifest["identity"]["settings"]),
        "prompt_loss": recipe.states.prompt_loss,
        "trained_on": round(manifest["counts"]["response_tokens"] * epochs),
        "mix": [{"source": s, "category": c, "prompts": n} for (s, c), n in sorted(mix.items())],
    }


def response_source(settings: dict[str, Any]) -> str:
    """Which model the responses came from, and how they were sampled."""
    if not settings["regenerate"]:
        return "responses that the data had, not the target's own"
    temperature = settings["temperature"]
    if isinstance(temperature, dict):  # value -> weight
        temperature = ", ".join(f"{value} ({weight})" for value, weight in temperature.items()) + " by weight"
    return f"responses of the target itself, temperature {temperature}"
