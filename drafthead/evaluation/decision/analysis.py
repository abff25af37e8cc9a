"""Everything that follows from the rows of one evaluation, what to serve included, for the terminal and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from drafthead.artifacts import MANIFEST, ArtifactError, describe_difference, read_manifest, reference, require
from drafthead.config import Recipe
from drafthead.config.evaluation import ALL, CONVERSATIONS, HEAD, TrafficConfig
from drafthead.engine.server import deployment_command, speculative_flag
from drafthead.evaluation.columns import setting_title
from drafthead.evaluation.comparison import across_blocks, differ, sum_of_parts, throughput_change
from drafthead.evaluation.decision.variants import SCHEDULED, Schedule, Variant, compare_variants, scheduled
from drafthead.evaluation.decision.verdict import DEPLOY, DO_NOT, UNKNOWN, UP_TO, Verdict, decide, reason_to_ignore
from drafthead.evaluation.measuring import acceptance, serving
from drafthead.evaluation.results.levels import (
    THROUGHPUT,
    LoadComparison,
    ServingRows,
    grouped,
    read_serving,
    summarise_serving,
)
from drafthead.evaluation.results.summary import AcceptanceSummary, summarise_acceptance
from drafthead.evaluation.workload import BASELINE, MethodNames, head_of, method_names, method_of, speculative_config


@dataclass(frozen=True)
class Analysis:
    """What was measured and what follows from it.

    Attributes:
        manifests: of the two measurements, by kind.
        acceptance: offline, prompt by prompt.
        rows: under load.
        levels: every method, draft length and load beside the baseline.
        verdicts: one for every workload and method, at the draft length that serves the traffic fastest.
        variants: other methods, beside the head at its best fixed draft length, the best first.
    """

    manifests: dict[str, dict[str, Any]]
    acceptance: AcceptanceSummary
    rows: ServingRows
    levels: list[LoadComparison]
    verdicts: list[Verdict]
    variants: list[Variant] = field(default_factory=list)

    @property
    def main(self) -> Verdict:
        """What to do: the best variant where it gains over the plain head, else that."""
        adopted = [variant.verdict for variant in self.variants if not variant.rejection_reason]
        return [*adopted, self.verdicts[0]][0]

    def levels_of(self, verdict: Verdict) -> list[LoadComparison]:
        """The levels that a verdict may rest on: of its workload, method and draft length, without a request rate."""
        return [x for x in self.levels if x.key.steady and x.key.over_loads == verdict.key]


def analyse(recipe: Recipe, rows: ServingRows | None = None) -> Analysis:
    """Draw every conclusion from both measurements of a recipe.

    Args:
        recipe: whose results are read.
        rows: under load; None: those of its directory.

    Raises:
        ArtifactError: acceptance or serving was not measured, or not to the end, or the two are of different heads,
            targets or longest responses, or of another head than is here now.
        ValueError: acceptance was synthetic, no load has two methods, none is of fixed concurrency, or the traffic's
            workload was not measured.
    """
    folders = {kind: recipe.results_dir / kind for kind in (acceptance.KIND, serving.KIND)}
    manifests = {kind: require(path, kind, f"python eval/{kind}.py RECIPE") for kind, path in folders.items()}
    _check_alike(*(manifests[kind]["identity"] for kind in folders))
    _check_head(recipe, manifests[serving.KIND]["identity"].get("head"))
    recipe, rows = _as_served(recipe, manifests), rows or read_serving(folders[serving.KIND])
    methods = manifests[serving.KIND]["identity"]["methods"]
    if any(method["extra"].get("rejection_sample_method") == "synthetic" for method in methods):
        raise ValueError(f"{recipe.results_dir} accepted drafts whatever they were: no verdict")
    answered = acceptance.read_acceptance(folders[acceptance.KIND])
    kind = recipe.eval.workloads
    workload_of = {} if kind == ALL else dict(zip(answered["prompt_id"], answered[kind], strict=True))
    levels = held_to_workloads(summarise_serving(rows), workload_of)
    if not levels:
        raise ValueError(f"no load of {recipe.results_dir} was run both without and with drafts: nothing to compare")
    verdicts = verdicts_of(recipe, levels)
    variants = compare_variants(recipe, verdicts, levels)
    return Analysis(manifests, summarise_acceptance(answered), rows, levels, verdicts, variants)


_ALIKE = ("target", "target_fingerprint", "dtype", "head", "max_tokens")


def _check_alike(offline: dict[str, Any], served: dict[str, Any]) -> None:
    both = [key for key in _ALIKE if key in offline and key in served]
    both += [key for key in ("chat_template_kwargs",) if key in offline or key in served]  # without: no arguments
    found, wanted = ({key: one.get(key, {}) for key in both} for one in (served, offline))
    if different := describe_difference(found, wanted):
        raise ArtifactError(
            f"serving was not measured with what acceptance was:\n{different}\n"
            "move the older of the two in results/NAME away, and run: python eval/head.py RECIPE"
        )


def _check_head(recipe: Recipe, measured: str | None) -> None:
    """Only what was served is advised: a head that was exported anew since was not."""
    head = head_of(recipe, method_of(recipe, HEAD)) if measured else None
    if head and (Path(head) / MANIFEST).exists() and reference(read_manifest(Path(head))) != measured:
        raise ArtifactError(
            f"{head} is not the head that was measured; move {recipe.results_dir} away, and run: "
            "python eval/head.py RECIPE"
        )


def _as_served(recipe: Recipe, manifests: dict[str, dict[str, Any]]) -> Recipe:
    """With the target and the engine of the servers, whatever the recipe has today: only what was served is advised."""
    served = manifests[serving.KIND]["identity"]
    return recipe.changed("engine", **served["engine"]).changed("target", path=served["target"], dtype=served["dtype"])


def compare_schedule(recipe: Recipe, schedule: Schedule, levels: list[LoadComparison]) -> Variant:
    """A schedule that was served beside the best fixed draft length, over the recipe's traffic."""
    traffic = _of_all_prompts(recipe)
    verdicts = verdicts_of(recipe, levels, traffic)
    found = compare_variants(recipe, verdicts, levels, traffic, (scheduled(recipe, schedule),))
    return next(variant for variant in found if variant.verdict.key.method == SCHEDULED)


def fixed_length(recipe: Recipe, levels: Sequence[LoadComparison], K: int) -> Verdict:
    """On the head at K draft tokens, over all prompts."""
    own = [level for level in levels if (level.key.method, level.key.K) == (HEAD, K)]
    return verdicts_of(recipe, own, _of_all_prompts(recipe))[0]


def _of_all_prompts(recipe: Recipe) -> TrafficConfig:
    """The recipe's traffic with the prompts that schedules are measured on."""
    return TrafficConfig(concurrency=recipe.eval.traffic.concurrency, workload=ALL)


def verdicts_of(
    recipe: Recipe, levels: Sequence[LoadComparison], traffic: TrafficConfig | None = None
) -> list[Verdict]:
    """One verdict for every workload and method; no load with a rate is judged.

    The workload of the traffic comes first, and of each the head, then the method that gains most; endpoints last.

    The traffic is eval.traffic, if no other is given. Where it names no workload it is all prompts, and conversations
    decide where the head loses on them: one that costs more in lost prefix-cache hits than its drafts bring is not
    deployed, however fast it answers prompts that share nothing. A draft length that loses there is chosen last, and
    they are judged at the one that was chosen. Where the head is not served, the first method takes its place.

    Raises:
        ValueError: the traffic's workload was not measured, or no load is of fixed concurrency.
    """
    by_setting: dict[tuple[str, float, int], tuple[dict[int, float], list[Verdict]]] = {}
    traffic = traffic or recipe.eval.traffic
    endpoints = {endpoint.name for endpoint in recipe.eval.endpoints}
    filled = [level for level in levels if level.key.steady]
    if not filled:
        rates = ", ".join(dict.fromkeys(level.key.load_name for level in levels))
        raise ValueError(
            f"nothing to judge: all loads have a request rate ({rates}), and the verdict is by requests in flight; "
            "add some with eval.concurrency=[1,8]. python eval/serving.py prints what was measured"
        )
    first = (traffic.workload or ALL, recipe.eval.temperatures[0])
    measured = sorted({level.key.setting for level in filled}, key=lambda setting: (setting[:2] != first, setting))
    if traffic.workload is not None and measured[0][:2] != first:
        there = ", ".join(setting_title(*setting) for setting in measured)
        raise ValueError(f"eval.traffic.workload {setting_title(*first, 1)} was not measured; there are: {there}")
    for setting in measured:
        here = [level for level in filled if level.key.setting == setting]
        # Conversations are measured at one load, whatever the traffic's are.
        spread = TrafficConfig() if setting[0] == CONVERSATIONS else traffic
        shares = spread.shares(level.key.concurrency for level in here)
        verdicts = [decide(own, shares, recipe.eval.slo) for own in grouped(here, "method", "K").values()]
        by_setting[setting] = shares, verdicts
    every = [verdict for _, verdicts in by_setting.values() for verdict in verdicts]
    lost = [v for v in every if v.key.workload == CONVERSATIONS and v.decision == DO_NOT]
    lost = lost if traffic.workload is None else []
    losing = {(v.key.method, v.key.K) for v in lost}
    found: list[Verdict] = []
    chosen: dict[str, int] = {}  # draft lengths of the traffic
    for (workload, _, _), (shares, verdicts) in by_setting.items():
        best: dict[str, Verdict] = {}  # of every method at its best draft length
        for verdict in sorted(verdicts, key=lambda v: _rank(v, shares, losing), reverse=True):
            if workload != CONVERSATIONS or chosen.get(verdict.key.method, verdict.key.K) == verdict.key.K:
                best.setdefault(verdict.key.method, verdict)
        chosen = chosen or {verdict.key.method: verdict.key.K for verdict in best.values()}
        order = {m: (m == HEAD, m not in endpoints, *_gain(v, shares)) for m, v in best.items()}
        found += [best[method] for method in sorted(best, key=order.__getitem__, reverse=True)]
    lead = [v for v in lost if v in found and v.key.method == found[0].key.method]
    return [*lead, *(v for v in found if v not in lead)]


# In one batch the workloads wait for each other's prompts, so that even on a steady machine they do not quite add up:
# how far they may miss is a choice, not a measurement.
MIXING = 0.05


def held_to_workloads(levels: Sequence[LoadComparison], workload_of: Mapping[str, str]) -> list[LoadComparison]:
    """The levels, those of all prompts together with what their workloads add up to where that is another change.

    A workload weighs as much as its prompts take of the baseline's time among all prompts. Prompts of a workload that
    was not measured alone, or decides nothing, are left out on both sides.

    Args:
        levels: of any method, workload and load.
        workload_of: prompt id -> the workload it belongs to.
    """
    alone = [x for x in levels if x.key.workload not in (ALL, CONVERSATIONS) and not reason_to_ignore(x)]

    def held(level: LoadComparison) -> LoadComparison:
        same = [x for x in alone if replace(x.key, workload=ALL) == level.key]
        parts = {x.key.workload: x.changes[THROUGHPUT.key] for x in same}
        known = level.paired.assign(workload=level.paired.index.map(lambda prompt: workload_of.get(prompt, "")))
        shared = known[known["workload"].isin([*parts])]
        if level.key.workload != ALL or shared.empty:
            return level
        columns = ("output_tokens_head", "share_s_head", "output_tokens_base", "share_s_base")
        by_block = level.by_block[THROUGHPUT.key]
        whole = across_blocks(throughput_change(*(shared[column] for column in columns)), by_block)
        weights = shared.groupby("workload")["share_s_base"].sum()
        expected = sum_of_parts([parts[name] for name in weights.index], weights)
        return replace(level, contradicted_by=expected) if differ(whole, expected, MIXING) else level

    return [held(level) for level in levels]


def _gain(verdict: Verdict, shares: dict[int, float]) -> tuple[bool, float]:
    """Whether the head is deployed, and the change over the whole traffic: none above c*, where nothing is drafted."""
    share = sum(share for c, share in shares.items() if verdict.up_to is None or c <= verdict.up_to)
    value = 1 / (share / (1 + verdict.change.value) + 1 - share) - 1
    return verdict.decision in (DEPLOY, UP_TO), -np.inf if np.isnan(value) else value


def _rank(verdict: Verdict, shares: dict[int, float], losing: set[tuple[str, int]]) -> tuple[bool, bool, float]:
    """By which a draft length is chosen: those that lose on conversations come after all that are deployed."""
    deployed, gain = _gain(verdict, shares)
    return deployed and (verdict.key.method, verdict.key.K) not in losing, deployed, gain


# How to serve what the verdict says: the configuration and the whole command, both as they were served.


class Advice(NamedTuple):
    """What to start, and why this and not something else."""

    text: str
    flag: str
    command: str


def advise(recipe: Recipe, analysis: Analysis) -> Advice:
    """The configuration that follows from the main verdict: one that was served at the loads it speaks of, or none."""
    verdict = analysis.main
    config = None if verdict.decision == DO_NOT else speculative_config(recipe, verdict.key.method, verdict.key.K)
    if verdict.decision == DO_NOT:
        text = "Serve without the head:"
    elif verdict.decision == UNKNOWN:
        text = f"{UNKNOWN}: nothing to serve yet. What was measured, at K = {verdict.key.K}:"
    elif verdict.decision == UP_TO:
        lost = [v.concurrency for v in verdict.levels if v.decision == DO_NOT and v.concurrency > (verdict.up_to or 0)]
        above = f"without the head from {min(lost)} on, where it loses" if lost else "above that nothing is resolved"
        text = f"Serve it at K = {verdict.key.K} for up to {verdict.up_to} requests at once; {above}:"
    else:
        text = f"Serve it at K = {verdict.key.K}:"
    names = method_names(recipe)
    notes = [*(variant.sentence(names) for variant in analysis.variants), *_fastest(analysis, names)]
    text = " ".join([text, *(f"{note}." for note in notes)])
    return Advice(text, speculative_flag(config), deployment_command(_as_served(recipe, analysis.manifests), config))


def _fastest(analysis: Analysis, names: MethodNames) -> list[str]:
    """Method and draft length with the highest measured throughput at each load; empty where one was served."""
    here = [x for x in analysis.levels if x.key.setting == analysis.main.key.setting and x.key.steady and x.reached]
    if len({(level.key.method, level.key.K) for level in here}) < 2:
        return []

    def gain(level: LoadComparison) -> float:
        return level.change(THROUGHPUT)

    best = [max(same, key=gain) for _, same in sorted(grouped(here, "concurrency").items())]
    at = (
        f"{names.at(x.key.method, x.key.K)}, at {x.key.concurrency} ({gain(x):+.1%})" if gain(x) > 0
        else f"{names[BASELINE]} at {x.key.concurrency}"
        for x in best
    )  # fmt: skip
    return [f"Fastest measured by requests in flight: {'; '.join(at)}"]
