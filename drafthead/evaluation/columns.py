"""Columns of the results that the decision reads, in one place, and what stands in for those a measurement lacks.

One row per server and load (`runs-*.parquet`):

    arm                string   "none" for the baseline, else the arm's name
    block              int      of the ABBA plan
    workload           string   which prompts; absent: "held-out"
    num_draft_tokens   int      K; absent: the manifest's, and 0 for the baseline
    concurrency        int      places in flight that were asked for
    load               string   name of the load, such as c8 or r64-b0.2-c32; absent: c + concurrency
    achieved, reached  float, bool   requests really in flight, and whether that is near enough
    requests, failed, output_tokens, prompt_tokens, duration_s
    drafts, proposed, accepted, accepted_at   the server's counters; accepted_at has one count per position
    kv_cache_tokens    int      tokens that fit the KV cache; absent: not known
    model_memory_gib   float    GPU memory of target and draft weights; absent: not known

One row per request (`requests-*.parquet`): the same keys, prompt_id, error, output_tokens, and the times of
evaluation/request_metrics.py.
"""

import pandas as pd

from drafthead.evaluation.workload import BASELINE

WORKLOAD = "held-out"
# What tells one series of measurements from another, at one load.
ARM_KEYS = ["arm", "num_draft_tokens"]
LOAD_KEYS = ["workload", "load", "concurrency"]
KEYS = [*ARM_KEYS, *LOAD_KEYS, "block"]


def completed(rows: pd.DataFrame, K: int) -> pd.DataFrame:
    """The rows with every key column present.

    Args:
        rows: of runs or of requests.
        K: draft tokens of every arm but the baseline, where the rows do not say.
    """
    rows = rows.copy()
    drafted = rows["arm"] != BASELINE
    if "num_draft_tokens" not in rows:
        rows["num_draft_tokens"] = drafted.map({True: K, False: 0})
    rows["num_draft_tokens"] = rows["num_draft_tokens"].where(drafted, 0).fillna(K).astype(int)
    if "workload" not in rows:
        rows["workload"] = WORKLOAD
    if "load" not in rows:
        rows["load"] = "c" + rows["concurrency"].astype(str)
    return rows
