"""The loop through its command: a real server whose head is swapped under load, and candidates that are judged."""

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from cryptography.fernet import Fernet
from safetensors.torch import load_file, save_file

from drafthead.adapting.capture import Log
from drafthead.adapting.control import folder, serving
from drafthead.adapting.loop import Loop
from drafthead.artifacts import read_json
from drafthead.config import REPO_ROOT, Recipe, load_recipe
from drafthead.engine.server import SERVER_MODULE
from drafthead.evaluation.workload import load_workload
from tests.pipeline.small_run import overrides_for
from tests.scripts import run_here, wait_for
from tests.warm import run_trainer, run_warm, warm

pytestmark = pytest.mark.slow
CAPTURE_ALL = ("adapt.rate=1", "adapt.min_tokens=16000")


def linked(tiny_run: Recipe, root: Path, *more: str) -> tuple[Recipe, tuple[str, ...]]:
    """The tiny run with room of its own for candidates."""
    for part in ("data", "runs", "heads"):
        (root / part).mkdir()
        (root / part / "tiny").symlink_to(Path(tiny_run.output_dir) / part / "tiny")
    overrides = overrides_for(root, *CAPTURE_ALL, *more)
    return load_recipe(overrides=overrides), overrides


def reversed_fc(head: Path, to: Path) -> Path:
    """A head that fits in its place and drafts badly."""
    shutil.copytree(head, to)
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].flip(0).contiguous()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def renumbered(head: Path, to: Path) -> Path:
    """The same head with its draft ids in the opposite order: what it drafts changes unless d2t is swapped, too."""
    shutil.copytree(head, to)
    tensors = load_file(head / "model.safetensors")
    ids = torch.arange(len(tensors["d2t"]))
    changed = {"d2t": (tensors["d2t"] + ids).flip(0) - ids, "lm_head.weight": tensors["lm_head.weight"].flip(0)}
    save_file({**tensors, **{name: t.contiguous() for name, t in changed.items()}}, to / "model.safetensors")
    return to


def test_twenty_swaps_under_load_change_no_answer(tiny_run, tmp_path):
    recipe, _ = linked(tiny_run, tmp_path, "adapt.consent=given")
    good, bad = recipe.head_dir, reversed_fc(recipe.head_dir, tmp_path / "bad")
    prompts = [p.prompt_ids for p in load_workload(recipe).prompts][:12]
    with serving(recipe, good) as control, control.server.client() as client, ThreadPoolExecutor(8) as places:
        counts = Log(folder(recipe) / "counts")

        def ask(ids: list[int]) -> list[int]:
            body = {"model": "tiny", "prompt": ids, "max_tokens": 64, "temperature": 0, "return_token_ids": True}
            return client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["token_ids"]

        def answers() -> tuple[list[list[int]], dict[str, float]]:
            found = list(places.map(ask, prompts))
            rows = counts.read()
            heads = {r["head"] for r in rows}
            accepted = {h: sum(r["accepted"] for r in rows if r["head"] == h) for h in heads}
            return found, {h: accepted[h] / sum(r["drafts"] for r in rows if r["head"] == h) for h in heads}

        before, lengths = answers()
        control.load(bad)
        assert answers()[1][str(bad)] < lengths[str(good)] / 2
        swaps = places.submit(lambda: [control.load((good, bad)[i % 2]) for i in range(20) if not time.sleep(0.2)])
        while not swaps.done():
            assert answers()[0] == before
        assert len(swaps.result()) == 20
        for head in (renumbered(good, tmp_path / "renumbered"), good):
            control.load(head)
            after, again = answers()
            assert (after, [*again.values()]) == (before, [*lengths.values()])

        # Refused, and the old head goes on: another shape, no head, no key.
        tensors = load_file(bad / "model.safetensors")
        save_file({**tensors, "fc.weight": tensors["fc.weight"][:8].clone()}, bad / "model.safetensors")
        for head in (bad, tmp_path / "nowhere"):
            with pytest.raises(ValueError, match="was not swapped in"):
                control.load(head)
        assert control.head() == str(good)
        for key in ("wrong", control.server.api_key):
            asked = httpx.get(f"{control.server.base_url}/adapt", headers={"Authorization": f"Bearer {key}"})
            assert asked.status_code == httpx.codes.UNAUTHORIZED
        past = {"method": "swap_draft", "args": [str(bad)]}
        asked = httpx.post(f"{control.server.base_url}/collective_rpc", json=past)
        assert asked.status_code == httpx.codes.NOT_FOUND
    log = (folder(recipe) / "server.log").read_text()
    assert str(prompts[0][:6])[1:-1] not in log
    captured = Log(folder(recipe) / "captured").read()
    assert {tuple(r["prompt_ids"]) for r in captured} == {tuple(ids) for ids in prompts}


def traffic_of(recipe: Recipe, root: Path, requests: int) -> list[str]:
    """The command of a loop that sends code which the recipe's head has not seen; again: to send more or fewer."""
    rows = [json.loads(line) for line in (REPO_ROOT / "data_gen/tiny/prompts.jsonl").read_text().splitlines()]
    known = set(json.loads((recipe.head_dir / "training_prompts.json").read_text())["ids"])
    unseen = [r for r in rows if r["split"] == "train" and r["category"] == "code" and r["id"] not in known]
    path, keys = root / "traffic.jsonl", ("messages", "category")
    path.write_text("".join(json.dumps({k: r[k] for k in keys}) + "\n" for r in unseen[:requests]))
    return ["data_gen/adapt.py", "--traffic", str(path), "--rate", "8"]


def begun(recipe: Recipe, overrides: tuple[str, ...], root: Path) -> list[str]:
    """A loop where acceptance has just fallen, and the command that goes on with it, on traffic that it sends."""
    loop = Loop.opened(recipe, [])
    loop.state.phase, loop.state.alarmed = "collect", time.time()
    loop.save()
    return [*traffic_of(recipe, root, 170), *overrides]


def shuffled(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
    """A redaction hook that spoils what is learned: the tokens of the response in the order of their numbers."""
    return prompt, sorted(response[:-1]) + response[-1:]


@pytest.mark.presets
def test_a_candidate_from_shuffled_responses_is_refused(tiny_run, tmp_path):
    hook = f"adapt.redact={__name__}:shuffled"
    recipe, overrides = linked(tiny_run, tmp_path, hook, "adapt.replay_share=0", "train.learning_rate=0.01")
    run_warm(*begun(recipe, overrides, tmp_path))
    state = read_json(folder(recipe) / "state.json")
    assert [e["event"] for e in state["history"]][:4] == ["in service", "training", "trained", "refused"]
    assert state["history"][3]["gains"]["all"]["high"] < 0
    assert [head["name"] for head in state["heads"]] == ["tiny"]


@pytest.mark.long
def test_a_better_candidate_is_in_service_after_a_kill(tiny_run, tmp_path, monkeypatch):
    """The head in service was hardly trained; its loop is killed while the candidate is made, and goes on."""
    # At a low rate AdamW learns little. Muon, whose rate is another, would leave the candidate nothing to gain.
    young = ("name=young", "data=tiny", "train.epochs=1", "train.optimizer=adamw", "adapt.trial_requests=0")
    recipe, overrides = linked(tiny_run, tmp_path, *young, "train.learning_rate=1e-4")
    run_trainer(*overrides)
    run_warm("export/head.py", *overrides, "--no-serve-check")
    quick = ("train.optimizer=muon", "train.learning_rate=3e-3", "train.epochs=4")
    command = begun(recipe, (*overrides, *quick), tmp_path)
    monkeypatch.setenv("DRAFTHEAD_CAPTURE_KEY", Fernet.generate_key().decode())
    copies = [tmp_path / part / "young-adapt-1" for part in ("data", "results")]
    process = warm().start(*command, log=tmp_path / "log")
    training = tmp_path / "runs" / "young-adapt-1"  # which follows the harvest
    wait_for(training.exists, tmp_path / "log", process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert read_json(folder(recipe) / "state.json")["heads"][-1]["name"] == "young"
    traffic_of(recipe, tmp_path, 8)  # enough was captured
    in_memory = [path.resolve() for path in copies]
    assert {path.parent for path in in_memory} == {Path("/dev/shm")}
    run_warm(*command)
    state = read_json(folder(recipe) / "state.json")
    assert state["heads"][-1]["name"] == "young-adapt-1", state["history"]
    (promotion,) = [e for e in state["history"] if e["event"] == "in service" and e["head"] == "young-adapt-1"]
    assert promotion["gains"]["all"]["low"] > 0
    # Of the captured text, only what the server wrote down is left, and that is the owner's.
    assert not [path for path in (*copies, *in_memory) if path.is_symlink() or path.exists()]
    kept = [p for p in folder(recipe).rglob("*") if p.is_file()]
    assert {p.parent.name for p in kept if p.suffix == ".log"} == {"counts", "captured", "young"}
    assert not {oct(p.stat().st_mode & 0o077) for p in kept} - {"0o0"}
    lines = [line for path in (folder(recipe) / "captured").iterdir() for line in path.read_bytes().splitlines()]
    assert lines
    assert not [line for line in lines if b"prompt_ids" in line]
    page = (tmp_path / "results" / "young" / "adapting" / "report.html").read_text()
    assert "young-adapt-1" in page

    assert run_here("data_gen/adapt.py", *overrides, "--roll-back") == 0
    assert read_json(folder(recipe) / "state.json")["heads"][-1]["name"] == "young"
    assert run_here("data_gen/adapt.py", *overrides, "--roll-back") == 1


@pytest.mark.long
def test_a_trial_goes_on_after_the_server_was_killed(tiny_run, tmp_path):
    """A bad head serves and a good one is on trial."""
    own = ("name=worse", "data=tiny", "adapt.trial_requests=32", "adapt.min_tokens=1000000", "responses.max_tokens=64")
    recipe, overrides = linked(tiny_run, tmp_path, *own)
    reversed_fc(tiny_run.head_dir, tmp_path / "heads" / "worse")
    shutil.copytree(tiny_run.head_dir, tmp_path / "heads" / "worse-adapt-1")
    loop = Loop.opened(recipe, [])
    loop.state.phase, loop.state.cycle, loop.state.attempt = "trial", 1, 1
    loop.state.alarmed = loop.state.reference_from = time.time()
    loop.save()
    command = [*traffic_of(recipe, tmp_path, 330), *overrides]  # 40 s, of which each head has 10 s at least

    def heads_seen() -> set[str]:
        return {Path(r["head"]).name for r in Log(folder(recipe) / "counts").read()}

    serving_alone = warm().start("data_gen/adapt.py", "--serve", *overrides, log=tmp_path / "serve.log")
    wait_for((folder(recipe) / "server.json").exists, tmp_path / "serve.log", serving_alone)
    process = warm().start(*command, log=tmp_path / "log")
    wait_for(lambda: "worse-adapt-1" in heads_seen(), tmp_path / "log", process)
    assert not [c for c in process.children() if SERVER_MODULE in " ".join(c.cmdline())]
    (server,) = [c for c in serving_alone.children() if SERVER_MODULE in " ".join(c.cmdline())]
    server.kill()
    for one, log in ((process, "log"), (serving_alone, "serve.log")):
        assert one.wait() == 1
        error = (tmp_path / log).read_text()
        assert "stopped answering" in error
        assert "Traceback" not in error
    state = read_json(folder(recipe) / "state.json")
    assert (state["phase"], [head["name"] for head in state["heads"]]) == ("trial", ["worse"])

    run_warm(*command)
    state = read_json(folder(recipe) / "state.json")
    (promotion,) = [e for e in state["history"] if e["event"] == "in service" and e["head"] == "worse-adapt-1"]
    assert promotion["gains"]["all"]["low"] > 0
    assert [head["name"] for head in state["heads"]] == ["worse", "worse-adapt-1"]
    assert heads_seen() >= {"worse", "worse-adapt-1"}
