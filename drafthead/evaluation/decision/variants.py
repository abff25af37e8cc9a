"""Does another way to draft gain over the recipe's head at a fixed draft length? Served side by side, never priced.

A variant is a method of the recipe: another head, n-grams, or the recipe's own head with further keys of vLLM's
speculative_config (a schedule of draft lengths, sampled drafts, cache blocks that are kept). It is adopted where its
gain over the traffic, against the best fixed draft length on the same prompts, lies above zero with its whole interval,
where it loses at no load, and where it is deployed up to no lower load. Where the recipe's own head is not served, the
fastest method takes its place. The best fixed length is picked by the same measurement, which favours it a little.

A schedule is what vLLM takes as `num_speculative_tokens_per_batch_size`: entries of first batch size, last batch size
and K, both ends included; the first starts at 1 and the ranges do not overlap (vllm/v1/spec_decode/dynamic/utils.py).
vLLM caps every K at num_speculative_tokens, carries the last K on to larger batches, and falls back to
num_speculative_tokens with data parallelism. The cost model proposes one, eval/draft_lengths.py serves it in blocks of
opposite order. At a single load it can at best equal the length that is best there: what it gains, it gains over a
traffic of several loads. It never proposes K = 0: the drafter's first pass still runs there, and around a threshold to
K = 0 throughput can collapse (vLLM issue 49548: from 232 to 24 tok/s). Where drafts do not pay, a server without the
head is the better half of two.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from drafthead.config import Recipe
from drafthead.config.evaluation import CONVERSATIONS, HEAD, MethodConfig, TrafficConfig
from drafthead.engine.offline import import_vllm
from drafthead.evaluation.decision.cost_model import CostModel, fit, speed_points
from drafthead.evaluation.decision.verdict import (
    DEPLOY,
    DO_NOT,
    UNKNOWN,
    UP_TO,
    Verdict,
    reason_to_ignore,
    traffic_change,
)
from drafthead.evaluation.measuring.plan import methods_plan, served_recipe
from drafthead.evaluation.measuring.serving import measure_serving
from drafthead.evaluation.results.levels import (
    THROUGHPUT,
    LoadComparison,
    ServingRows,
    read_serving,
    steady,
    summarise_serving,
)
from drafthead.evaluation.workload import MethodNames, method_of
from drafthead.files import reading_external
from drafthead.statistics import Change

KEY = "num_speculative_tokens_per_batch_size"
# A longer schedule for less than this is noise, and every draft length has CUDA graphs of its own.
WORTH = 0.01

Schedule = list[list[int]]
Loads = Mapping[int, LoadComparison]  # concurrency -> level


class Variant(NamedTuple):
    """A variant beside the plain head.

    Attributes:
        verdict: on the variant.
        beside: the method it is compared with.
        against: the fixed draft length that serves the traffic fastest.
        change: of output throughput over the traffic, against that.
        by_load: the same at every load alone; as in the verdict, loads that decide nothing are left out.
        rejection_reason: why it is not adopted; empty where it is.
    """

    verdict: Verdict
    beside: str
    against: int
    change: Change
    by_load: dict[int, Change]
    rejection_reason: str

    def sentence(self, names: MethodNames) -> str:
        """For the terminal and the report."""
        gain = f"{names[self.verdict.key.method]} at K = {self.verdict.key.K}: {self.change.text()} output throughput"
        rejected = f"; not advised: {self.rejection_reason}" if self.rejection_reason else ""
        return f"{gain} against the {names[self.beside]} at its best fixed draft length, K = {self.against}{rejected}"


def compare_variants(
    recipe: Recipe,
    verdicts: Sequence[Verdict],
    levels: Sequence[LoadComparison],
    traffic: TrafficConfig | None = None,
    added: Sequence[MethodConfig] = (),
) -> list[Variant]:
    """Every other method that was served on the workload of the first verdict, the best first.

    Args:
        recipe: its methods.
        verdicts: of all methods and workloads; the first is on the method that the others are compared with.
        levels: of all methods.
        traffic: what is served; None: as the recipe says.
        added: methods that the recipe does not list.
    """
    traffic = traffic or recipe.eval.traffic
    setting = verdicts[0].key.setting
    here = [level for level in levels if level.key.setting == setting and level.key.steady]
    shares = traffic.shares(level.key.concurrency for level in here)
    first, *others = [verdict for verdict in verdicts if verdict.key.setting == setting]
    lengths = {level.key.K for level in here if level.key.method == first.key.method}
    fixed = {K: _loads(here, first.key.method, K) for K in lengths}
    losing = {(v.key.method, v.key.workload_title) for v in verdicts if v.decision == DO_NOT}
    found = []
    for verdict in others:
        if not verdict.key.K:  # a server of others, which drafts as it likes
            continue
        ours = _loads(here, verdict.key.method, verdict.key.K)
        measured = {c: share for c, share in shares.items() if c in ours} or dict.fromkeys(ours, 1.0)
        sides = (ours, *fixed.values())
        weights = {c: share for c, share in measured.items() if not any(reason_to_ignore(side[c]) for side in sides)}
        best = max(fixed, key=lambda K: _speedup(fixed[K], weights or measured))
        by_load = {c: gain_over(ours, fixed[best], {c: 1.0}) for c in weights}
        change = gain_over(ours, fixed[best], weights)
        lost = sorted(w for method, w in losing if method == verdict.key.method and (first.key.method, w) not in losing)
        variant = Variant(verdict, first.key.method, best, change, by_load, "")
        schedule = method_of(recipe, verdict.key.method, added).extra.get(KEY)
        # Where conversations lead because the traffic may have some, it has other prompts, too.
        reason = _rejection_reason(variant, first, lost, schedule)
        if traffic.workload is None and setting[0] == CONVERSATIONS:
            same = (v for v in verdicts if v.key.method == verdict.key.method and v.key.workload != CONVERSATIONS)
            if (of_all := next(same, None)) and of_all.decision != DEPLOY:
                reason = f"{of_all.headline} on {of_all.key.workload_title} prompts"
        found.append(variant._replace(rejection_reason=reason))
    return sorted(found, key=lambda variant: (bool(variant.rejection_reason), -variant.change.value))


def _rejection_reason(variant: Variant, plain: Verdict, lost: list[str], schedule: Schedule | None) -> str:
    """Why a variant is not advised."""
    verdict = variant.verdict
    if lost:
        return f"it loses against no speculation on {', '.join(lost)} prompts, where the other does not"
    if verdict.decision in (UNKNOWN, DO_NOT):
        return f"{verdict.decision} against no speculation"
    if _highest(verdict) < _highest(plain):
        return f"{verdict.headline}, where the other is {plain.headline}"
    if not variant.change.low > 0:
        return "no resolved gain"
    worse = [str(c) for c, at in variant.by_load.items() if at.high < 0]
    if worse:
        return f"it loses at concurrency {', '.join(worse)}"
    for first, last, K in schedule or ():
        if not any(first <= c <= last for c in variant.by_load):
            return f"no load of {first} to {last} requests was measured, where it drafts {K}"
    return ""


def _highest(verdict: Verdict) -> float:
    """The load up to which a verdict deploys."""
    return {DEPLOY: np.inf, UP_TO: verdict.up_to or 0}.get(verdict.decision, 0)


def _loads(levels: Sequence[LoadComparison], method: str, K: int) -> dict[int, LoadComparison]:
    return {level.key.concurrency: level for level in levels if (level.key.method, level.key.K) == (method, K)}


def gain_over(ours: Loads, plain: Loads, weights: dict[int, float]) -> Change:
    """Change of output throughput over a traffic, paired by prompt, with what blocks of server starts differ by.

    Args:
        ours, plain: the two, both measured beside the same baseline.
        weights: load -> share of the baseline's time.
    """
    both = ["output_tokens", "share_s"]
    pairs = {}
    for c in weights:
        head, base = (levels[c].paired[[f"{name}_head" for name in both]] for levels in (ours, plain))
        pairs[c] = head.join(base.set_axis([f"{name}_base" for name in both], axis=1), how="inner")
    # What the plain head spends at each load, where the baseline spends the traffic's share.
    spent = {c: share / (1 + plain[c].change(THROUGHPUT)) for c, share in weights.items()}
    by_block = [(1 + ours[c].by_block[THROUGHPUT.key]) / (1 + plain[c].by_block[THROUGHPUT.key]) - 1 for c in weights]
    return traffic_change(pairs, spent, np.array(by_block))


def _speedup(levels: Loads, weights: dict[int, float]) -> float:
    """Over the traffic, against no speculation, up to a factor: 1 / Σ share / speedup."""
    return 1 / sum(share / (1 + levels[c].change(THROUGHPUT)) for c, share in weights.items())


# A schedule, proposed by the cost model and then served beside the fixed lengths it is made of.

SCHEDULED = "schedule"


def best_schedule(model: CostModel, max_batch: int) -> Schedule:
    """The draft length, of those that were run, that decodes fastest at every batch size; within 1 % neighbours share.

    Args:
        model: fitted.
        max_batch: the server's max_num_seqs.
    """
    among = [K for K in model.curve if K]
    chosen: list[int] = []
    for batch in range(1, max_batch + 1):
        best = max(among, key=lambda K: model.speedup(batch, K))
        before = chosen[-1] if chosen else best
        keeps = model.speedup(batch, before) >= (1 - WORTH) * model.speedup(batch, best)
        chosen.append(before if keeps else best)
    ranges = [(K, [batch for batch, _ in group]) for K, group in groupby(enumerate(chosen, 1), key=lambda at: at[1])]
    return [[batches[0], batches[-1], K] for K, batches in ranges]


def modelled_schedule(recipe: Recipe) -> tuple[Schedule, list[LoadComparison]]:
    """Measure the recipe's fixed draft lengths, and let the cost model fill in a schedule; that and what was measured.

    Raises:
        ValueError: a single draft length or load, from which no schedule follows.
    """
    settings = recipe.eval
    if len(settings.draft_tokens) < 2 or len(settings.steady_loads) < 2:
        raise ValueError(
            f"a schedule chooses between draft lengths by load: eval.num_draft_tokens {list(settings.draft_tokens)} "
            f"and eval.concurrency {[load.name for load in settings.loads]} need two values each, such as [3,1] and "
            "[1,32]"
        )
    limit = served_recipe(recipe, settings.steady_loads).engine.max_num_seqs
    rows = _measured(recipe, "fixed")
    return best_schedule(fit(speed_points(steady(rows), HEAD, limit)), limit), summarise_serving(rows)


def given_schedule(recipe: Recipe, schedule: Any) -> Schedule:
    """A schedule as a user gives it, with its batch sizes in ascending order.

    Raises:
        ValueError: it has one draft length, or one beyond the recipe's, or vLLM would not start with it.
    """
    import_vllm()
    from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

    longest = max(recipe.eval.draft_tokens)
    with reading_external(f"schedule {schedule}", "Give another with --schedule '[[1,2,3],[3,64,1]]'", ValueError):
        found = [list(entry) for entry in validate_and_normalize_dynamic_sd_schedule(schedule)]
    lengths = {K for _, _, K in found}
    if len(lengths) < 2 or max(lengths) > longest:
        raise ValueError(
            f"schedule {schedule}: a comparison needs two draft lengths, none above {longest}, the longest of "
            "eval.num_draft_tokens; give another with --schedule"
        )
    return found


def measure_schedule(recipe: Recipe, schedule: Schedule) -> list[LoadComparison]:
    """Serve the schedule beside every fixed draft length, in results/NAME/draft-lengths/schedule."""
    return summarise_serving(_measured(recipe, SCHEDULED, scheduled(recipe, schedule)))


def scheduled(recipe: Recipe, schedule: Schedule) -> MethodConfig:
    """The schedule as a method of the recipe's head, at the longest draft length."""
    longest = (max(recipe.eval.draft_tokens),)
    return MethodConfig(name=SCHEDULED, method=HEAD, num_draft_tokens=longest, extra={KEY: schedule})


def _measured(recipe: Recipe, folder: str, *added: MethodConfig) -> ServingRows:
    """Nothing served but the head and these methods, at loads of fixed concurrency, in blocks."""
    served = (HEAD, *(method.name for method in added))
    repeats = max(2 * bool(added), recipe.eval.repeats)  # A B, B A: at the least
    plan = methods_plan(recipe, served, recipe.eval.steady_loads, repeats, added=added)
    return read_serving(measure_serving(recipe, plan, recipe.results_dir / "draft-lengths" / folder))
