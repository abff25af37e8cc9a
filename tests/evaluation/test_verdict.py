"""The decision: per load, over traffic, under a service level, and what follows for the server."""

import json
import re
import shlex
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from drafthead.config.evaluation import LoadConfig, SLOConfig, TrafficConfig
from drafthead.evaluation.decision.analysis import Advice, Analysis, advise, held_to_workloads, verdicts_of
from drafthead.evaluation.decision.variants import compare_variants
from drafthead.evaluation.decision.verdict import DEPLOY, DO_NOT, UNKNOWN, UP_TO, decide, judge, losses
from drafthead.evaluation.reporting.measured_tables import brief_table, levels_table, memory_table
from drafthead.evaluation.results.levels import LoadComparison, ServingRows, completed, summarise_serving
from drafthead.evaluation.workload import speculative_config
from drafthead.statistics import Change
from tests.evaluation.rows import JUDGED, NAMES, each, served, slower, together
from tests.recipes import tiny_recipe

# Faster, faster, noise, slower.
SPEEDS = {1: 1.5, 4: 1.3, 8: 1.0, 32: 0.8}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_recipe(tmp_path_factory.mktemp("verdict"), "eval.price_per_gpu_hour=3.6")


@pytest.fixture(scope="module")
def rows(recipe):
    return served(recipe, head_speed=SPEEDS, prompts=160, lengths=(1, 3))


@pytest.fixture(scope="module")
def levels(rows):
    return summarise_serving(rows)


def _at(level: LoadComparison, concurrency: int) -> LoadComparison:
    return replace(level, key=replace(level.key, load=LoadConfig(concurrency=concurrency)))


def _decide(levels: list[LoadComparison], loads: tuple[int, ...], slo: SLOConfig | None = None):
    chosen = [level for level in levels if level.key.K == 3 and level.key.concurrency in loads]
    return decide(chosen, TrafficConfig().shares(loads), slo)


@pytest.mark.parametrize(
    ("loads", "decision", "up_to"),
    [
        ((1, 4), DEPLOY, None),
        ((1, 4, 8, 32), UP_TO, 4),
        ((8,), UNKNOWN, None),
        ((8, 32), DO_NOT, None),
    ],
)
def test_the_four_decisions(levels, loads, decision, up_to):
    verdict = _decide(levels, loads)
    assert (verdict.decision, verdict.up_to) == (decision, up_to)
    assert verdict.change.resolved == (decision != UNKNOWN)
    assert re.search(r"[+-]\d+\.\d % \[[+-]\d", verdict.reason)


def test_a_gain_beside_a_loss_that_no_interval_resolves_decides_nothing(levels):
    """8 requests at once are unresolved, the gain at 32 is resolved, and the slower pairs at 8 outweigh it."""
    by_load = {level.key.concurrency: level for level in levels if level.key.K == 3}
    pairs, unresolved = by_load[8].paired.copy(), dict.fromkeys(by_load[8].changes, Change(-0.02, -0.5, 0.4))
    noise = np.where(np.arange(len(pairs)) % 2, 2.0, 0.1)  # hardly a prompt as fast as another
    pairs["share_s_head"] *= noise
    verdict = decide(
        [replace(by_load[8], paired=pairs, changes=unresolved), _at(by_load[4], 32)],
        {8: 0.95, 32: 0.05},
    )
    assert [at.decision for at in verdict.levels] == [UNKNOWN, DEPLOY]
    assert verdict.change.value < 0
    assert not verdict.change.resolved
    assert (verdict.decision, verdict.up_to) == (UNKNOWN, None)


@pytest.mark.parametrize("shares", [{2: 0.98, 4: 0.02}, {2: 0.9, 4: 0.02, 8: 0.08}])
def test_a_loss_over_the_traffic_is_not_deployed_however_it_is_spread(levels, shares):
    """A loss of 20 % at 2 requests at once, itself unresolved, beside a gain at 4."""
    by_load = {level.key.concurrency: level for level in levels if level.key.K == 3}
    loss = Change(-0.2, -0.5, 0.1)
    unresolved = dict.fromkeys(by_load[32].changes, loss)
    verdict = decide([replace(_at(by_load[32], 2), changes=unresolved), by_load[4], by_load[8]], shares)
    assert [at.decision for at in verdict.levels] == [UNKNOWN, DEPLOY, UNKNOWN][: len(shares)]
    assert (verdict.decision, verdict.up_to) == (DO_NOT, None)


def test_a_load_that_was_not_run_is_never_deployed_at(levels):
    own = [level for level in levels if level.key.K == 3]
    verdict = decide(own, {1: 0.5, 2: 0.3, 16: 0.2})
    by_load = {v.concurrency: v for v in verdict.levels}
    assert (verdict.decision, verdict.up_to) == (UP_TO, 1)
    assert by_load[2].decision == UNKNOWN
    assert "add 2 to eval.concurrency" in by_load[2].reason
    assert decide(own, {256: 1.0}).levels[0].decision == UNKNOWN
    most = decide(own, {1: 0.2, 2: 0.7, 4: 0.1})
    assert (most.decision, most.up_to) == (UNKNOWN, None)
    assert "30% of the traffic" in most.reason
    up_to = decide(own, {1: 0.2, 2: 0.7, 8: 0.1})
    assert up_to.headline == "DEPLOY UP TO concurrency 1"
    below = decide(own, {1: 0.1, 2: 0.6, 4: 0.1, 8: 0.1, 32: 0.1})  # gains at 4, but mostly not run up to there
    assert (below.decision, below.up_to) == (UNKNOWN, None)
    assert below.change.value < 0.2  # of all loads that were run, not only of those that gain


def test_a_missed_service_level_is_no_load_to_deploy_at(levels):
    # TTFT is 20 ms without the head and 13 ms with it at concurrency 1; at 32 it is 25 ms with it.
    for slo, decision in (
        (SLOConfig(ttft_ms=50, tpot_ms=50, percentile=90), DEPLOY),
        (SLOConfig(ttft_ms=17, percentile=90), DEPLOY),  # the baseline misses it
        (SLOConfig(ttft_ms=5), DO_NOT),
        (SLOConfig(ttft_ms=14.5), UNKNOWN),  # about the P95 of the head itself
    ):
        assert _decide(levels, (1,), slo).decision == decision


def test_requests_that_wait_in_one_block_only_count_as_they_are(one_load):
    """Of every block one request in eight waits 4 s, each time another one: averages would be 1.3 s."""

    def late(frame: pd.DataFrame, block: int) -> pd.DataFrame:
        frame = frame.assign(block=block)
        if "ttft_s" in frame:
            frame.loc[(frame["method"] == "head") & (frame["prompt_id"].str[1:].astype(int) % 8 == block), "ttft_s"] = (
                4.0
            )
        return frame

    blocks = together(*(each(one_load, lambda f, block=block: late(f, block)) for block in range(3)))
    (level,) = summarise_serving(blocks)
    assert level.values["ttft_p95"][1] == 4.0
    assert level.changes["ttft_p95"].value == pytest.approx(level.values["ttft_p95"][0] / 4 - 1)
    assert judge(level, SLOConfig(ttft_ms=2000)).decision == DO_NOT


def test_the_answer_begins_behind_the_reasoning(one_load):
    """Twice the time to the first token in these rows, but for a response that was cut off before its answer."""
    cut = each(
        one_load, lambda f: f.assign(ttfot_s=f["ttfot_s"].mask(f["prompt_id"] == "p000")) if "ttft_s" in f else f
    )
    (level,) = summarise_serving(completed(*cut), ("ttfot_mean", "itl_answer_mean"))
    own = cut.requests[(cut.requests["method"] == "none") & (cut.requests["prompt_id"] != "p000")]
    assert level.values["ttfot_mean"][0] == pytest.approx(2 * own["ttft_s"].mean())
    per_token = (own["e2e_s"] - 2 * own["ttft_s"]) / (own["output_tokens"] - 1)
    assert level.values["itl_answer_mean"][0] == pytest.approx(per_token.mean())


def test_a_gain_beyond_what_acceptance_can_give_is_noise_of_the_machine(tmp_path):
    (level,) = summarise_serving(served(tiny_recipe(tmp_path), head_speed={1: 3.0}))  # an acceptance length of 2.4
    assert judge(level).decision == UNKNOWN


def test_what_got_worse_stands_in_the_reason_of_a_deployment(one_load):
    """The wait for the first token is 2.3 times as long, the next tokens come faster; all prefix hits are gone."""
    requests, runs = one_load.requests.copy(), one_load.runs.assign(prefix_queries=1000)
    head = requests["method"] == "head"
    requests.loc[head, "ttft_s"] *= 1.5 * 2.3
    runs["prefix_hits"] = np.where(runs["method"] == "head", 0, 342)
    (level,) = summarise_serving(ServingRows(requests, runs))
    times = {key: "{:.1f} → {:.1f}".format(*(1e3 * x for x in level.values[key])) for key in ("ttft_p50", "ttft_p95")}
    assert {key: values for key, (_, values) in losses(level).items()} == times | {"prefix-cache hits": "34.2 → 0.0"}
    verdict = decide([level], {1: 1.0})
    assert verdict.decision == DEPLOY
    for text in (verdict.reason.splitlines()[-1], verdict.levels[0].reason):
        assert "TTFT, median" in text
        assert "34.2 → 0.0" in text
        assert times["ttft_p50"] in text
    assert re.search(r"2\.[23] times longer", verdict.levels[0].reason)
    assert losses(replace(level, reached=False)) == {}  # decides nothing, of nothing


@pytest.mark.parametrize(("longer", "prompts", "warned"), [(0, 160, False), (3, 160, True), (3, 15, False)])
def test_responses_of_another_length_are_warned_of(one_load, longer, prompts, warned):
    """Every second response of the head is longer by so many tokens."""
    requests, runs = one_load
    requests = requests[requests["prompt_id"] < f"p{prompts:03d}"]
    odd = (requests["method"] == "head") & (requests["prompt_id"].str[1:].astype(int) % 2 == 0)
    (level,) = summarise_serving(
        ServingRows(requests.assign(output_tokens=requests["output_tokens"] + longer * odd), runs)
    )
    before, after = level.response_length
    assert after - before == pytest.approx(level.longer_by.value) == pytest.approx(longer / 2, rel=0.1)
    assert level.length_differs == warned
    shown = levels_table("", [level], NAMES)
    cells = [row[list(shown.frame).index("Response (tokens)")] for row in shown.rows]
    assert cells[0].text == f"{before:.1f}"
    assert cells[1].text.startswith(f"{after:.1f}")
    assert cells[1].tone == ("worse" if warned else "unresolved" if longer else "")
    assert ("all at 1 (EAGLE-3 head, K = 3)" in shown.note) == warned
    assert (f"{before:.1f} → {after:.1f} tokens" in judge(level).reason) == warned


@pytest.fixture(scope="module")
def one_load(rows) -> ServingRows:
    """One request at a time, without drafts and at K = 3."""
    return ServingRows(*(frame[(frame["concurrency"] == 1) & (frame["k"] != 1)] for frame in rows))


def _with_failures(rows: ServingRows, failed: int) -> ServingRows:
    """The first requests of the head failed at once, as seen by a client that keeps the times it has."""
    requests, runs = rows.requests.copy(), rows.runs.copy()
    lost = requests[requests["method"] == "head"].groupby("concurrency").head(failed).index
    requests.loc[lost, ["error", "output_tokens", "e2e_s"]] = ["connection refused", 0, 0.0]
    return ServingRows(requests, runs.assign(failed=(runs["method"] == "head") * failed))


@pytest.mark.parametrize(("failed", "decision"), [(1, DEPLOY), (8, UNKNOWN), (160, UNKNOWN)])
def test_requests_that_failed_are_no_gain(one_load, failed, decision):
    (level,) = summarise_serving(_with_failures(one_load, failed))
    assert (level.failed, len(level.paired)) == (failed, 160 - failed)
    assert judge(level).decision == decision
    assert decide([level], {1: 1.0}).change.resolved == (decision == DEPLOY)


def test_answers_of_one_token_have_no_time_per_token(one_load):
    requests = one_load.requests.assign(output_tokens=1, tpot_s=np.nan, itl_s=np.nan)
    (level,) = summarise_serving(ServingRows(requests, one_load.runs))
    assert np.isnan(level.changes["tpot_p95"].value)
    assert judge(level, SLOConfig(tpot_ms=20)).decision == UNKNOWN


def test_blocks_that_disagree_decide_nothing(one_load):
    """The head is half as fast again in one block of server starts, and as fast as the baseline in the next."""
    plain, head = (
        each(one_load, lambda f, method=method: f[f["method"] == method].assign(block=1)) for method in ("none", "head")
    )
    blocks = together(one_load, plain, each(head, lambda f: slower(f, 1.5)))
    (level,), (alone,) = summarise_serving(blocks), summarise_serving(one_load)
    first = alone.changes["output_tokens_per_s"].value
    assert level.by_block["output_tokens_per_s"] == pytest.approx([first, (1 + first) / 1.5 - 1])
    assert judge(alone).decision == DEPLOY
    assert judge(level).decision == UNKNOWN
    assert not decide([level], {1: 1.0}).change.resolved


@pytest.mark.parametrize(
    ("every", "chat", "code", "decided"),
    [
        (1.3, 1.2, 1.4, True),
        (1.25, 1.2, 1.4, True),  # 1.29 is expected: as close as prompts that wait for each other allow
        (1.24, 1.36, 1.4, False),
        (1.5, 1.36, 1.4, False),
        (1.3, 0.8, 1.1, False),
        (1.3, 0.8, 0.7, False),
        (1.0, 0.8, 0.7, False),
        (0.75, 0.8, 0.7, True),
        (0.8, 1.2, 1.3, False),
    ],
)
def test_a_load_that_is_not_what_its_workloads_add_up_to_decides_nothing(tmp_path, every, chat, code, decided):
    """All prompts together, and two thirds of them alone; the others are of a workload that was not measured."""
    recipe, speeds = tiny_recipe(tmp_path), {"all": every, "chat": chat, "code": code}
    rows = served(recipe, head_speed={1: 1.3}, prompts=160, workloads=tuple(speeds))
    measured = [each(rows, lambda f: f[f["method"] == "none"])]
    for name, speed in speeds.items():
        own = each(rows, lambda f, name=name: f[(f["method"] != "none") & (f["workload"] == name)])
        measured.append(each(own, lambda f, speed=speed: slower(f, 1.3 / speed)))
    workload_of = {f"p{i:03d}": ("chat", "code", "long")[i % 3] for i in range(160)}
    levels = held_to_workloads(summarise_serving(together(*measured), JUDGED), workload_of)
    verdict = verdicts_of(recipe, levels)[0]
    (level,) = verdict.levels
    assert level.decision == (UNKNOWN if not decided else DEPLOY if every > 1 else DO_NOT)
    whole, *alone = sorted(levels, key=lambda level: level.key.workload)
    assert (whole.contradicted_by is None) == decided
    assert all(level.contradicted_by is None for level in alone)
    if not decided:
        assert whole.contradicted_by.value == pytest.approx(2 / (1 / chat + 1 / code) - 1, rel=0.15)
        assert whole.contradicted_by.text() in verdict.reason


def test_the_draft_length_is_the_one_that_serves_the_traffic_fastest(tmp_path):
    """K = 3 is 1.5 times as fast at 1 and slower at 32, K = 1 is 1.4 and 1.1 times as fast: the share of 32 decides."""
    rows = served(tiny_recipe(tmp_path), head_speed={1: 1.5, 32: 0.9}, prompts=96, lengths=(1, 3))
    levels = summarise_serving(rows, JUDGED)
    for share, chosen in ((0.1, (1, "DEPLOY")), (0.9, (3, "DEPLOY UP TO concurrency 1"))):
        traffic = (f"eval.traffic.concurrency.1={share}", f"eval.traffic.concurrency.32={1 - share}")
        (verdict,) = verdicts_of(tiny_recipe(tmp_path, *traffic), levels)
        assert (verdict.key.K, verdict.headline) == chosen


def _advice(recipe, rows, levels, **engine: int) -> Advice:
    verdicts = verdicts_of(recipe, levels)
    variants = compare_variants(recipe, verdicts, levels)
    served = {"engine": recipe.engine.model_dump() | engine, "target": recipe.target.path, "dtype": "float32"}
    manifests = {"serving": {"identity": served}}
    return advise(recipe, Analysis(manifests, None, rows, levels, verdicts, variants))


def _config(advice: Advice) -> dict:
    return json.loads(shlex.split(advice.flag)[1])


def test_what_is_advised_was_served(recipe, rows, levels):
    advice = _advice(recipe, rows, levels)
    assert _config(advice) in [speculative_config(recipe, "head", K) for K in (1, 3)]
    command = shlex.split(advice.command)
    assert advice.flag in advice.command
    assert command[command.index("--max-num-seqs") + 1] == "64"
    today = recipe.changed("engine", max_model_len=700).changed("target", dtype="bfloat16")  # whatever it says
    other = shlex.split(_advice(today, rows, levels, max_num_seqs=200, max_model_len=1024).command)
    for flag, value in (("--max-num-seqs", "200"), ("--max-model-len", "1024"), ("--dtype", "float32")):
        assert other[other.index(flag) + 1] == value


def test_no_draft_is_called_fastest_where_all_of_them_lose(tmp_path):
    recipe = tiny_recipe(tmp_path)
    rows = served(recipe, head_speed={1: 1.5, 32: 0.7}, lengths=(1, 3))
    text = _advice(recipe, rows, summarise_serving(rows, JUDGED)).text
    assert re.search(r"EAGLE-3 head, K = 3, at 1 \(\+\d.*; no speculation at 32", text)


def test_above_the_loads_that_gain_another_server_is_advised(recipe, rows, levels):
    own = [level for level in levels if level.key.K == 3]
    advice = _advice(recipe, rows, own)
    assert _config(advice) == speculative_config(recipe, "head", 3)
    assert "up to 4 requests at once; without the head from 32 on" in advice.text


@pytest.mark.parametrize(
    ("speeds", "reached", "doubt"),
    [
        ({1: 1.2, 4: 1.2}, True, ""),
        ({1: 1.0, 4: 1.0}, True, "no resolved gain"),
        ({1: 1.0, 4: 1.2}, False, "where the other is DEPLOY"),
        ({1: 1.2, 4: 1.2}, False, "where the other is DEPLOY"),
    ],
)
def test_a_variant_is_advised_where_it_gains(recipe, rows, speeds, reached, doubt):
    """One that keeps the last cache block, as fast as the head or faster, at a load of 4 that it may not have reached.

    That load is in no change of it.
    """
    kept = "{name: kept, method: head, extra: {disable_eagle_block_drop: true}}"
    beside = tiny_recipe(recipe.output_dir, f"eval.methods=[head,{kept}]")
    few = each(rows, lambda f: f[f["concurrency"] < 8])
    kept = each(few, lambda f: slower(f[f["k"] == 3].assign(method="kept"), 1 / f["concurrency"].map(speeds)))
    kept.runs.loc[kept.runs["concurrency"] == 4, "reached"] = reached
    both = together(few, kept)
    levels = [x for x in summarise_serving(both, JUDGED) if x.key.K == 3]
    advice = _advice(beside, both, levels)
    assert _config(advice) == speculative_config(beside, "head" if doubt else "kept", 3)
    assert doubt in advice.text
    (variant,) = compare_variants(beside, verdicts_of(beside, levels), levels)
    assert list(variant.by_load) == [1, 4][: 1 + reached]
    assert variant.change.value == pytest.approx(np.mean([*speeds.values()][: 1 + reached]) - 1)


@pytest.mark.parametrize(
    ("speeds", "losing", "picked"),
    [
        ({"head": 1.0, "other": 1.2}, (), "other"),
        # Conversations are no part of the traffic.
        ({"head": 1.0, "other": 1.2}, ("head", "other"), "other"),
        ({"head": 1.0, "other": 1.2}, ("other",), "head"),
        ({"head": 1.0, "other": 0.95}, (), "head"),
        ({"head": 1.0, "ngram": 1.2}, (), "ngram"),  # served without being in eval.methods
        ({"other": 0.95, "third": 1.0}, (), "third"),  # the recipe's own is not served
    ],
)
def test_the_verdict_picks_the_head_that_serves_fastest(recipe, rows, speeds, losing, picked):
    heads = "{name: other, method: dflash, head: org/other}, {name: third, method: eagle3, head: org/third}"
    several = tiny_recipe(recipe.output_dir, f"eval.methods=[head,{heads}]")
    few = each(rows, lambda f: f[f["concurrency"] < 8])
    found = [each(few, lambda f: f[f["method"] == "none"])]
    found += [each(few, lambda f, m=m: slower(f[f["k"] == 3].assign(method=m), 1 / speeds[m])) for m in speeds]
    turns = [
        each(part, lambda f: slower(f.assign(workload="multi-turn"), 3 if f["method"].iat[0] in losing else 1))
        for part in found
    ]
    both = together(*found, *turns)
    advice = _advice(several, both, summarise_serving(both, JUDGED))
    assert _config(advice) == speculative_config(several, picked, 3)
    best = NAMES[max(speeds, key=speeds.__getitem__)]
    assert f"{best}, K = 3, at 1 (" in advice.text


@pytest.mark.parametrize(
    ("wait_s", "hits", "traffic", "decision"),
    [
        (0.0, 0.7, ("eval.traffic.workload=null",), DEPLOY),
        (0.5, 0.0, ("eval.traffic.workload=null",), DO_NOT),  # prompts that were found in the cache are computed again
        (0.5, 0.0, (), DEPLOY),  # no conversations in this traffic
    ],
)
def test_lost_prefix_hits_that_cost_more_than_drafts_bring_flip_the_verdict(tmp_path, wait_s, hits, traffic, decision):
    recipe = tiny_recipe(tmp_path, *traffic)
    requests, runs = served(recipe, head_speed={8: 1.3}, prompts=96, workloads=("all", "multi-turn"))
    runs = runs.assign(prefix_queries=1000, prefix_hits=700)
    for rows, columns in ((requests, ["e2e_s", "ttft_s"]), (runs, ["duration_s"])):
        slower = (rows["method"] == "head") & (rows["workload"] == "multi-turn")
        rows.loc[slower, columns] += wait_s * (1 if rows is requests else 96 / 8)
    runs.loc[(runs["method"] == "head") & (runs["workload"] == "multi-turn"), "prefix_hits"] = 1000 * hits
    verdict = verdicts_of(recipe, summarise_serving(ServingRows(requests, runs)))[0]
    assert verdict.decision == decision
    assert ("70.0 → 0.0 %" in " ".join(level.reason for level in verdict.levels)) == (decision == DO_NOT)
    cells = [[cell.text for cell in row] for row in memory_table(completed(requests, runs).runs, NAMES).rows]
    assert [row[-2:] for row in cells] == [["70.0", "–"], [f"{100 * hits:.1f}", f"{100 * (hits / 0.7 - 1):+.1f}"]]


def slowed(recipe, *parts: tuple[str, str, int, dict[int, float]]) -> list:
    """Levels at 1 and 8 requests of all prompts and conversations: (workload, method, K, load -> times as long)."""
    rows = served(recipe, head_speed={1: 1.6, 8: 1.6}, prompts=96, workloads=("all", "multi-turn"), lengths=(1, 3))
    found = [each(rows, lambda f: f[f["method"] == "none"])]
    for workload, method, k, factors in parts:
        own = each(rows, lambda f, k=k, w=workload: f[(f["k"] == k) & (f["workload"] == w)])
        found += [
            each(own, lambda f, c=c, x=x, m=method: slower(f[f["concurrency"] == c].assign(method=m), x))
            for c, x in factors.items()
        ]
    return summarise_serving(together(*found), JUDGED)


@pytest.mark.parametrize(
    ("shorter", "wanted"),
    [(1.0, ("all", 1, DEPLOY)), (2.0, ("multi-turn", 3, DO_NOT))],
    ids=["the shorter gains there, too", "both lose there"],
)
def test_conversations_are_judged_at_the_draft_length_that_is_served(tmp_path, shorter, wanted):
    """K = 3 is the faster one on all prompts, and loses on conversations."""
    recipe = tiny_recipe(tmp_path, "eval.traffic.workload=null")
    both = {1: 1.0, 8: 1.0}
    parts = [("all", "head", 3, both), ("all", "head", 1, both)]
    parts += [("multi-turn", "head", 3, {8: 2.0}), ("multi-turn", "head", 1, {8: shorter})]
    first, *others = verdicts_of(recipe, slowed(recipe, *parts))
    assert (first.key.workload, first.key.K, first.decision) == wanted
    assert {verdict.key.K for verdict in others} == {first.key.K}


def test_another_method_that_loses_on_conversations_is_not_deployed(tmp_path):
    recipe = tiny_recipe(tmp_path, "eval.traffic.workload=null", "eval.methods=[head,ngram]")
    parts = [("all", "ngram", 3, {1: 1.0, 8: 1.0}), ("multi-turn", "ngram", 3, {8: 2.0})]
    first = verdicts_of(recipe, slowed(recipe, *parts))[0]
    assert (first.key.workload, first.decision) == ("multi-turn", DO_NOT)


def test_a_method_that_gains_on_conversations_alone_is_not_advised(tmp_path):
    """The head loses there, the other gains there and loses at 8 of all prompts together."""
    recipe = tiny_recipe(tmp_path, "eval.traffic.workload=null", "eval.methods=[head,ngram]")
    parts = [("all", "head", 3, {1: 1.0, 8: 1.0}), ("multi-turn", "head", 3, {8: 2.0})]
    parts += [("all", "ngram", 3, {1: 1.0, 8: 2.0}), ("multi-turn", "ngram", 3, {8: 1.0})]
    levels = slowed(recipe, *parts)
    verdicts = verdicts_of(recipe, levels)
    assert (verdicts[0].key.workload, verdicts[0].key.method, verdicts[0].decision) == ("multi-turn", "head", DO_NOT)
    (variant,) = compare_variants(recipe, verdicts, levels)
    assert variant.change.low > 0
    assert variant.rejection_reason == "DEPLOY UP TO concurrency 1 on all prompts"


def test_memory_is_compared_on_as_many_gpus(rows):
    two = each(rows, lambda f: f.assign(tensor_parallel=2))
    two.runs["kv_cache_tokens"] *= 3
    table = memory_table(together(rows, two).runs, NAMES)
    assert [[cell.text for cell in row] for row in table.rows if "K = 3" in row[0].text] == [
        ["EAGLE-3 head, K = 3", "90,000", "-10.0"], ["EAGLE-3 head, K = 3 TP2", "270,000", "-10.0"],
    ]  # fmt: skip


def test_a_head_that_slows_serving_is_left_out_of_the_command(recipe, rows, levels):
    slow = [level for level in levels if level.key.concurrency in (8, 32) and level.key.K == 3]
    advice = _advice(recipe, rows, slow)
    assert advice.flag == ""
    assert "--speculative-config" not in advice.command


@pytest.mark.parametrize(("prompts", "decision"), [(15, UNKNOWN), (16, DEPLOY)])
def test_too_few_prompts_decide_nothing_and_their_acceptance_is_marked(tmp_path, prompts, decision):
    levels = summarise_serving(served(tiny_recipe(tmp_path), head_speed={1: 1.5}, prompts=prompts))
    assert {decide(levels, {1: 1.0}).decision} == {decision}
    for shown in (brief_table(levels, NAMES), levels_table("", levels, NAMES)):
        text = shown.rows[-1][list(shown.frame).index("Acceptance length")].text
        assert ("too few" in text) == (decision == UNKNOWN)


def test_the_main_verdict_is_over_the_workload_of_the_traffic_at_the_main_temperature(tmp_path):
    rows = served(tiny_recipe(tmp_path), head_speed={1: 1.3}, prompts=16, workloads=("MT-Bench", "all"))
    levels = summarise_serving(together(rows, each(rows, lambda f: f.assign(temperature=1.0))))
    for temperatures, of, main in (
        ("[0,1]", "null", ("all", 0, 1)), ("[1,0]", "null", ("all", 1, 1)), ("[1,0]", "MT-Bench", ("MT-Bench", 1, 1)),
    ):  # fmt: skip
        recipe = tiny_recipe(tmp_path, f"eval.temperatures={temperatures}", f"eval.traffic.workload={of}")
        assert verdicts_of(recipe, levels)[0].key.setting == main


def test_traffic_of_a_workload_that_was_not_measured_is_refused(recipe, levels):
    elsewhere = tiny_recipe(recipe.output_dir, "eval.traffic.workload=mlperf")
    with pytest.raises(ValueError, match="eval.traffic.workload mlperf"):
        verdicts_of(elsewhere, levels)
