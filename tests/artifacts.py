"""Prompts and responses that no stage made, each a whole artifact."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data import responses
from drafthead.data.prompts import SPLITS, Prompt, prompt_id, write_prompts
from drafthead.data.responses import Response


def ask(text: str, category: str = "chat") -> Prompt:
    """A prompt of one question."""
    messages = ({"role": "user", "content": text},)
    return Prompt(prompt_id(messages), "local", category, messages)


def write_prompt_artifact(recipe: Recipe, **splits: Sequence[Prompt]) -> str:
    """Prompts of all splits; one that is not given has one question of its own. Returns the artifact's reference."""
    artifacts.begin(recipe.prompts_dir, "prompts", {})
    for split in SPLITS:
        write_prompts(recipe.prompts_dir / f"{split}.parquet", list(splits.get(split, [ask(split)])))
    return artifacts.reference(artifacts.finish(recipe.prompts_dir, {}))


def response(
    name: str, prompt: int, answer: int, after: int = 0, ids: Sequence[int] | None = None, category: str = "chat"
) -> Response:
    """A response of so many tokens of prompt, answer and continuation; without `ids` they count from 0."""
    ids = list(range(prompt + answer + after)) if ids is None else list(ids)
    parts = ids[:prompt], ids[prompt : prompt + answer], ids[prompt + answer :]
    return Response(name, category, *parts, "text", "stop", 0.0, "low", 0)


def write_response_artifact(directory: Path, rows: list[Response]) -> str:
    """All responses in one part. Returns the artifact's reference."""
    artifacts.begin(directory, responses.KIND, {})
    responses.write_part(responses.part_path(directory, 0), rows)
    prompts, generated = sum(len(r.prompt_ids) for r in rows), sum(len(r.response_ids) for r in rows)
    counts = {"responses": len(rows), "prompt_tokens": prompts, "response_tokens": generated}
    return artifacts.reference(artifacts.finish(directory, counts))


def read_responses(directory: Path) -> list[Response]:
    """All responses of an artifact, with their texts, in prompt order."""
    return [Response(**row) for part in sorted(directory.glob("part-*")) for row in pq.read_table(part).to_pylist()]


def cached_snapshot(hub: Path, repository: str, commit: str) -> Path:
    """The folder of a repository's files in a cache of the hub, as a download of its main branch leaves it.

    Args:
        hub: directory of the hub's cache.
        repository: "models--OWNER--NAME" or "datasets--OWNER--NAME".
        commit: commit that main is at.
    """
    snapshot = hub / repository / "snapshots" / commit
    for folder in (snapshot, hub / repository / "refs"):
        folder.mkdir(parents=True)
    (hub / repository / "refs" / "main").write_text(commit)
    return snapshot
