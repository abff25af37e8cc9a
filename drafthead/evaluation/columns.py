"""The columns of every Parquet file that a measurement writes: the one place that says what they mean.

Times are in seconds. A list column holds one list per row.
"""

ACCEPTANCE_COLUMNS = {  # results/NAME/acceptance/*.parquet, one row per prompt and condition
    "arm": "name of the arm; `none` is the baseline, `none-again` its second run",
    "k": "draft tokens per round; 0 for the baseline",
    "temperature": "of sampling; 0 is greedy",
    "effort": "reasoning effort told to the chat template",
    "prompt_id": "content hash of the prompt",
    "source": "data set of the prompt",
    "category": "workload of the prompt",
    "prompt_tokens": "length of the prompt",
    "output_ids": "token ids of the answer",
    "output_sha256": "of the ids; equal hashes are equal answers",
    "num_tokens": "length of the answer",
    "drafts": "verification steps that had a draft",
    "proposed": "draft tokens proposed",
    "accepted": "draft tokens accepted",
    "accepted_at": "(k,) steps that accepted position i, and so all before it",
    "reached_at": "(k,) steps that accepted all positions before i and proposed one at i",
    "histogram": "(k + 1,) steps that accepted exactly j draft tokens",
    "finish_reason": "stop or length",
    "repeated": "share of the answer's 8-grams that occurred before; above 0.1 it loops",
}
