"""Result files of other tools: the same times give the same figures, whichever tool wrote them down."""

import json

import numpy as np
import pytest

from drafthead.evaluation.imports import import_results
from drafthead.evaluation.serving_overview import imported_table

# Sent at 10 s; chunks at 11, 12 and 14 s carry 1, 3 and 3 tokens; the answer proper starts with the second.
VLLM = {
    "duration": 4.0, "total_output_tokens": 7, "request_rate": "inf", "max_concurrency": 2, "median_ttft_ms": 1000.0,
    "start_times": [10.0, 10.5], "ttfts": [1.0, 0.0], "itls": [[1.0, 2.0], []], "input_lens": [5, 5],
    "output_lens": [7, 0], "generated_texts": ["text", ""], "errors": ["", "refused"],
}  # fmt: skip
GUIDELLM = {
    "benchmarks": [{
        "config": {"strategy": {"type_": "concurrent", "streams": 2}},
        "requests": {"successful": [{
            "request_id": "a", "prompt_tokens": 5, "output_tokens": 7, "time_to_first_token_ms": 1000.0,
            "time_per_output_token_ms": 571.4, "inter_token_latency_ms": 500.0,
            "info": {"timings": {
                "request_start": 10.0, "first_token_iteration": 11.0, "first_output_token_iteration": 12.0,
                "last_token_iteration": 14.0, "token_iterations": 3, "request_end": 14.1,
            }},
        }]},
    }],
}  # fmt: skip


def _import(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    return import_results(path)


def test_both_tools_give_the_same_figures(tmp_path):
    ours, theirs = (_import(tmp_path, content)[0] for content in (VLLM, GUIDELLM))
    assert (ours.tool, ours.name, theirs.tool, theirs.name) == ("vllm bench", "c2", "guidellm", "concurrent-2")
    for level in (ours, theirs):
        row = level.requests.iloc[0]
        assert len(level.requests) == 1  # the failed one is left out
        assert (row["ttft_s"], row["e2e_s"], row["itl_s"]) == (1.0, 4.0, 1.5)
        assert row["tpot_s"] == pytest.approx(3 / 6)
        assert row["tpot_all_s"] == pytest.approx(4 / 7)
        assert level.output_tokens_per_s == pytest.approx(7 / 4)
    assert theirs.requests["ttfot_s"].iloc[0] == 2.0


def test_what_guidellm_calls_itl_is_our_tpot(tmp_path):
    level = _import(tmp_path, GUIDELLM)[0]
    assert 1e3 * level.requests["tpot_s"].iloc[0] == pytest.approx(level.stated["inter_token_latency_ms"])
    assert 1e3 * level.requests["tpot_all_s"].iloc[0] == pytest.approx(
        level.stated["time_per_output_token_ms"], rel=1e-3
    )
    cells = [cell.text for cell in imported_table([[level]]).rows[0]]
    assert cells[4:10] == ["1000.0", "2000.0", "500.0", "1500.0", "571.4", "4000.0"]
    assert "inter_token_latency_ms 500" in cells[-1]


def test_an_answer_of_one_token_has_no_gap(tmp_path):
    single = VLLM | {"output_lens": [1, 0], "itls": [[], []], "ttfts": [1.0, 0.0]}
    row = _import(tmp_path, single)[0].requests.iloc[0]
    assert np.isnan(row["tpot_s"])
    assert np.isnan(row["itl_s"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({k: v for k, v in VLLM.items() if k != "start_times"}, "--save-detailed"),
        ({"something": 1}, "neither of"),
        ({"benchmarks": [{"requests": {"successful": []}}]}, "no successful request"),
        ({"benchmarks": [{"requests": {"successful": [{"start_time": 1}]}}]}, "before 0.5"),
    ],
)
def test_files_that_hold_no_requests_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        _import(tmp_path, content)
