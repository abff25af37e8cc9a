"""Result files of other tools in which one answer has times that can be counted by hand."""

# Sent at 10 s; chunks at 11, 12 and 14 s carry 1, 3 and 3 tokens; the answer proper starts with the second.
VLLM = {
    "duration": 4.0, "total_output_tokens": 7, "request_rate": "inf", "max_concurrency": 2, "median_ttft_ms": 1000.0,
    "start_times": [10.0, 10.5], "ttfts": [1.0, 0.0], "itls": [[1.0, 2.0], []], "input_lens": [5, 5],
    "output_lens": [7, 0], "generated_texts": ["text", ""], "errors": ["", "refused"],
}  # fmt: skip

GUIDELLM = {
    "benchmarks": [{
        "config": {"strategy": {"type_": "concurrent", "streams": 2}},
        "metrics": {
            name: {"successful": {"median": value}}
            for name, value in (
                ("time_to_first_token_ms", 1000.0),
                ("time_per_output_token_ms", 571.4),
                ("inter_token_latency_ms", 500.0),
            )
        },
        "requests": {"successful": [{
            "request_id": "a", "prompt_tokens": 5, "output_tokens": 7,
            "info": {"timings": {
                "request_start": 10.0, "first_token_iteration": 11.0, "first_output_token_iteration": 12.0,
                "last_token_iteration": 14.0, "token_iterations": 3, "request_end": 14.1,
            }},
        }]},
    }],
}  # fmt: skip
