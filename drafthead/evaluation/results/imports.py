"""Result files of other tools, read into the same raw times and computed by the same formulas.

`vllm bench serve --save-result --save-detailed` keeps every gap between chunks. GuideLLM (0.5 and later) keeps the
times of the first and last chunk with text and the number of chunks: enough for every mean of one request, not for the
spread of its gaps. Both also state figures of their own, kept beside ours so that the two can be reconciled. What makes
them differ on one file (vLLM 0.32.0, GuideLLM 0.8.1), beside what `request_metrics` says of names:

    vLLM's median ITL is over all gaps of all requests, ours over the mean gaps of requests
    GuideLLM's first token is the first chunk with text: special tokens that the server hides, such as Harmony's
    channels, do not count
    GuideLLM's medians are an observation, the lower one of the two in the middle; those of TPOT and ITL weigh requests
    by their tokens
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from drafthead.engine.load import RequestTimes
from drafthead.evaluation.measuring.request_metrics import RequestMetrics, request_metrics


@dataclass(frozen=True)
class ImportedLevel:
    """One load of a result file.

    Attributes:
        tool: vllm bench or guidellm.
        name: of the level.
        requests: one row per successful request: prompt_tokens, output_tokens, start_s and the metrics of
            `RequestMetrics`; ttfot_s too where the tool knows it.
        failed: requests that failed, or were cut off when the tool's time was over; no figure counts them.
        duration_s: from the first sending to the last token.
        stated: medians in milliseconds as the tool itself printed them: TTFT, TPOT and ITL by its own definitions.
    """

    tool: str
    name: str
    requests: pd.DataFrame
    failed: int
    duration_s: float
    stated: dict[str, float] = field(default_factory=dict)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of the successful requests over the wall time."""
        return float(self.requests["output_tokens"].sum() / self.duration_s)


def import_results(path: str | Path) -> list[ImportedLevel]:
    """Read a result file, whichever of the two it is.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is neither, has no single requests, or none that succeeded.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON: {error}; GuideLLM writes JSON with --output kind=json,path=FILE.json"
        ) from error
    if isinstance(raw, dict) and "benchmarks" in raw:
        return [_guidellm(path, benchmark) for benchmark in raw["benchmarks"]]
    if isinstance(raw, dict) and "total_output_tokens" in raw:
        return [_vllm_bench(path, raw)]
    raise ValueError(f"{path} is neither of `vllm bench serve --save-result` nor of GuideLLM")


def _vllm_bench(path: str | Path, raw: dict[str, Any]) -> ImportedLevel:
    if "start_times" not in raw:
        raise ValueError(f"{path} has no single requests: run `vllm bench serve` with --save-detailed")
    times = _vllm_times(raw)
    names = {"TTFT": "median_ttft_ms", "TPOT": "median_tpot_ms", "ITL": "median_itl_ms"}
    # Absent where the client ran without a tokenizer, as it does from here.
    stated: dict[str, float] = {label: raw[name] for label, name in names.items() if name in raw}
    rows = [_row(t, request_metrics(t)) for t in times if not t.error]
    failed = [t.error for t in times if t.error]
    if not rows:
        raise ValueError(f"{path}: all {len(failed)} requests failed, the first with: {failed[0].strip()[-200:]}")
    return ImportedLevel("vllm bench", _vllm_load(raw), pd.DataFrame(rows), len(failed), float(raw["duration"]), stated)


def _vllm_times(raw: dict[str, Any]) -> list[RequestTimes]:
    """In the order of sending."""
    first = min(raw["start_times"])
    return [
        RequestTimes(
            id=str(i),
            # The client's reason is the status line's, which may be empty; a request without tokens failed.
            error=raw["errors"][i] or ("" if raw["output_lens"][i] else "refused without a reason"),
            prompt_tokens=raw["input_lens"][i],
            output_tokens=raw["output_lens"][i],
            start_s=start - first,
            ttft_s=raw["ttfts"][i],
            gaps_s=raw["itls"][i],
            latency_s=raw["latencies"][i] if "latencies" in raw else raw["ttfts"][i] + sum(raw["itls"][i]),
            text=raw["generated_texts"][i],
        )
        for i, start in enumerate(raw["start_times"])
    ]


def _vllm_load(raw: dict[str, Any]) -> str:
    """By the names of `LoadConfig`."""
    rate, cap = raw.get("request_rate"), raw.get("max_concurrency")
    parts = [f"r{rate}" if rate not in (None, "inf") else "", f"c{cap}" if cap else ""]
    return "-".join(filter(None, parts)) or "all at once"


def _row(times: RequestTimes, metrics: RequestMetrics) -> dict[str, Any]:
    counts = {"prompt_tokens": times.prompt_tokens, "output_tokens": times.output_tokens, "start_s": times.start_s}
    return counts | {"ttfot_s": np.nan} | asdict(metrics)


def _guidellm(path: str | Path, benchmark: dict[str, Any]) -> ImportedLevel:
    requests = benchmark["requests"]["successful"]
    if not requests:
        raise ValueError(f"{path}: a benchmark has no successful request")
    if "timings" not in requests[0].get("info", {}):
        raise ValueError(f"{path} was written by a GuideLLM before 0.5, whose requests have other fields: run it again")
    if not any(request["info"]["timings"]["last_token_iteration"] for request in requests):
        raise ValueError(f"{path} was written without streaming, so no token has a time: run it again with stream=true")
    begun = min(request["info"]["timings"]["request_start"] for request in requests)
    rows = pd.DataFrame([_guidellm_row(request, begun) for request in requests])
    duration = float((rows["start_s"] + rows["e2e_s"]).max())
    names = {
        "TTFT": "time_to_first_token_ms", "TPOT": "time_per_output_token_ms", "ITL": "inter_token_latency_ms"
    }  # fmt: skip
    stated = {label: float(benchmark["metrics"][name]["successful"]["median"]) for label, name in names.items()}
    strategy = benchmark.get("config", {}).get("strategy", {})
    name = "-".join(str(strategy[key]) for key in ("type_", "streams", "rate") if strategy.get(key))
    failed = sum(len(benchmark["requests"].get(kind) or ()) for kind in ("errored", "incomplete"))
    return ImportedLevel("guidellm", name or "benchmark", rows, failed, duration, stated)


def _guidellm_row(request: dict[str, Any], begun: float) -> dict[str, Any]:
    timings, n = request["info"]["timings"], request["output_tokens"] or 0
    keys = ("request_start", "first_token_iteration", "first_output_token_iteration", "last_token_iteration")
    # null where a request showed no text
    sent, first, final, last = (np.nan if timings.get(key) is None else timings[key] for key in keys)
    chunks = timings["token_iterations"]
    return {
        "prompt_tokens": request["prompt_tokens"],
        "output_tokens": n,
        "start_s": sent - begun,
        "ttft_s": first - sent,
        "ttfot_s": final - sent,
        "e2e_s": last - sent,
        "tpot_s": (last - first) / (n - 1) if n > 1 else np.nan,
        "itl_s": (last - first) / (chunks - 1) if chunks > 1 else np.nan,
        "tpot_all_s": (last - sent) / n if n else np.nan,
    }
