"""The columns of every Parquet file that a measurement writes: the one place that says what they mean.

Times are in seconds. A list column holds one list per row.
"""

ACCEPTANCE_COLUMNS = {  # results/NAME/acceptance/*.parquet, one row per prompt and condition
    "arm": "name of the method; `none` is the baseline, `none-again` its second run",
    "k": "draft tokens per round; 0 for the baseline",
    "temperature": "of sampling; 0 is greedy",
    "effort": "reasoning effort told to the chat template",
    "prompt_id": "content hash of the prompt",
    "source": "data set of the prompt",
    "category": "workload of the prompt",
    "prompt_tokens": "length of the prompt",
    "output_ids": "token ids of the response",
    "output_sha256": "of the ids; equal hashes are equal responses",
    "num_tokens": "length of the response",
    "drafts": "verification steps that had a draft",
    "proposed": "draft tokens proposed",
    "accepted": "draft tokens accepted",
    "accepted_at": "(k,) steps that accepted position i, and so all before it",
    "reached_at": "(k,) steps that accepted all positions before i and proposed one at i",
    "finish_reason": "stop or length",
    "repeated": "share of the response's 8-grams that occurred before; above 0.1 it loops (data/responses.py)",
}

_LEVEL = {  # shared by requests and runs: which server, which load
    "arm": "name of the method or endpoint; `none` is the baseline",
    "k": "draft tokens per round; 0 for the baseline and for endpoints",
    "block": "of the ABBA design; a block starts every server once",
    "tensor_parallel": "GPUs of the server",
    "workload": "prompts of the level, with temperature and GPUs where they are not 0 and 1; `all`: every held-out one",
    "throughput_only": "whether the prompts are random or filler, where acceptance means nothing",
    "temperature": "of sampling; 0 is greedy",
    "load": "name of the load: c8, r64-b0.2-c32",
    "concurrency": "most requests in flight; 0: no cap",
    "request_rate": "requests per second; inf: sent as places become free",
    "burstiness": "shape of the gamma-distributed gaps between requests; 1 is Poisson",
}

FORMULAS = {  # of a request with n output tokens
    "ttft_s": "first token − sent, any channel",
    "ttfot_s": "first token of Harmony's final channel − sent; NaN where it never came",
    "e2e_s": "last token − sent",
    "tpot_s": "(last − first) / (n − 1); vLLM's TPOT, GuideLLM's ITL",
    "itl_s": "mean gap between chunks; vLLM's ITL, one gap is one verification step",
    "tpot_all_s": "(last − sent) / n; GuideLLM's TPOT, includes the wait for the first token",
}

REQUEST_COLUMNS = (
    _LEVEL
    | {  # results/NAME/serving*/requests-*.parquet, one row per request
        "prompt_id": "content hash of the prompt",
        "error": "empty when the request succeeded",
        "prompt_tokens": "as the server counted them",
        "output_tokens": "as the server counted them",
        "start_s": "when it was sent, from the start of the level",
        "gaps_s": "between chunks; a chunk carries all tokens of a verification step",
        "text": "the output with its special tokens",
    }
    | FORMULAS
)

RUN_COLUMNS = _LEVEL | {  # results/NAME/serving*/runs-*.parquet, one row per server and level
    "requests": "sent",
    "failed": "of them",
    "achieved": "mean number in flight while there were requests to send, as the client saw it",
    "running": "requests running in the engine, median of samples over that time; NaN: the server does not say",
    "waiting": "requests waiting in its queue, likewise",
    "reached": "whether that is the load that was requested",
    "duration_s": "from the first sending to the last response",
    "output_tokens": "of the successful requests",
    "prompt_tokens": "of the successful requests",
    "output_tokens_per_s": "output_tokens / duration_s",
    "server_start_s": "from starting the process to its first healthy reply",
    "kv_cache_tokens": "tokens that fit the server's KV cache; NaN: not known",
    "weights_gib": "GPU memory of the weights, draft included; NaN: not known",
    "server_command": "JSON list",
    "finished_at": "Unix time",
    "drafts": "verification steps that had a draft, from the server's counters",
    "proposed": "draft tokens proposed",
    "accepted": "draft tokens accepted",
    "accepted_at": "(k,) drafts that accepted position i",
    "prefix_queries": "prompt tokens looked up in the prefix cache",
    "prefix_hits": "of them found there",
}
