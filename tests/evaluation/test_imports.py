"""Result files of other tools: the same times give the same figures, whichever tool wrote them down."""

import json
from pathlib import Path

import numpy as np
import pytest

from drafthead.evaluation.reporting.serving_tables import imported_table
from drafthead.evaluation.results.imports import import_results
from tests.evaluation.result_files import GUIDELLM, VLLM

FILES = Path(__file__).parent / "files"
REAL = FILES / "guidellm-0.8.1.json"


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
    assert (ours.failed, theirs.failed) == (1, 0)
    for level in (ours, theirs):
        assert (row["ttft_s"], row["e2e_s"], row["itl_s"]) == (1.0, 4.0, 1.5)
        assert row["tpot_s"] == pytest.approx(3 / 6)
        assert row["tpot_all_s"] == pytest.approx(4 / 7)
        assert level.output_tokens_per_s == pytest.approx(7 / 4)
    assert theirs.requests["ttfot_s"].iloc[0] == 2.0


def test_requests_that_failed_are_not_fast_ones(tmp_path):
    """A status line may give no reason; then nothing but the missing tokens says that it failed."""
    silent = VLLM | {"errors": ["", ""]}
    assert _import(tmp_path, silent)[0].requests["ttft_s"].tolist() == [1.0]
    with pytest.raises(ValueError, match="refused"):
        _import(tmp_path, silent | {"output_lens": [0, 0], "errors": ["refused", ""]})
    cut = json.loads(json.dumps(GUIDELLM))
    cut["benchmarks"][0]["requests"] |= {"errored": [{}], "incomplete": [{}, {}]}
    assert _import(tmp_path, cut)[0].failed == 3


def test_what_guidellm_calls_itl_is_our_tpot(tmp_path):
    level = _import(tmp_path, GUIDELLM)[0]
    assert 1e3 * level.requests["tpot_s"].iloc[0] == pytest.approx(level.stated["ITL"])
    assert 1e3 * level.requests["tpot_all_s"].iloc[0] == pytest.approx(level.stated["TPOT"], rel=1e-3)
    cells = [cell.text for cell in imported_table([level]).rows[0]]
    assert cells[5:11] == ["1000.0", "2000.0", "500.0", "1500.0", "571.4", "4000.0"]
    assert cells[-1] == "TTFT 1000.0, TPOT 571.4, ITL 500.0"


def test_a_file_that_guidellm_wrote_gives_its_own_figures():
    """0.8.1 on vLLM with the embedded target, one and two at a time: `guidellm run --profile kind=concurrent ...`."""
    raw = json.loads(REAL.read_text())
    levels = import_results(REAL)
    assert [level.name for level in levels] == ["concurrent-1", "concurrent-2"]
    for level, theirs in zip(levels, raw["benchmarks"], strict=True):
        requests, metrics = theirs["requests"]["successful"], theirs["metrics"]
        assert len(level.requests) == 6
        # Request by request: their names, our formulas.
        for ours, name in (
            ("ttft_s", "time_to_first_token_ms"), ("ttfot_s", "time_to_first_output_token_ms"),
            ("tpot_s", "inter_token_latency_ms"), ("tpot_all_s", "time_per_output_token_ms"),
        ):  # fmt: skip
            assert (1e3 * level.requests[ours]).tolist() == pytest.approx([r[name] for r in requests])
        # All together: what GuideLLM prints is the lower observation, a median of ours lies between the two.
        assert level.stated["TTFT"] == pytest.approx(1e3 * level.requests["ttft_s"].sort_values().iloc[2])
        assert level.output_tokens_per_s == pytest.approx(
            metrics["output_tokens_per_second"]["successful"]["mean"], rel=1e-3
        )
        # Latency ends with the last text here, and with the end of the stream there.
        behind = metrics["request_latency"]["successful"]["mean"] - level.requests["e2e_s"].mean()
        assert 0 < behind < 0.01
        # Special tokens have no text: fewer chunks than tokens without any speculation.
        assert (level.requests["output_tokens"] == 24).all()
        assert max(r["info"]["timings"]["token_iterations"] for r in requests) == 20


def test_a_file_that_vllm_wrote_gives_its_own_figures():
    """`vllm bench serve --save-detailed` 0.32.0 with a tokenizer, the same prompts two at a time."""
    (level,) = import_results(FILES / "vllm-bench-0.32.0.json")
    medians = 1e3 * level.requests[["ttft_s", "tpot_s"]].median()
    assert (level.stated["TTFT"], level.stated["TPOT"]) == pytest.approx(tuple(medians))
    gaps = np.concatenate(json.loads((FILES / "vllm-bench-0.32.0.json").read_text())["itls"])
    assert level.stated["ITL"] == pytest.approx(1e3 * np.median(gaps))
    assert level.output_tokens_per_s == pytest.approx(85.67, abs=0.01)


def test_requests_without_text_have_no_times(tmp_path):
    real = json.loads(REAL.read_text())
    silent = real["benchmarks"][0]["requests"]["successful"][0]["info"]["timings"]
    silent |= {key: None for key in silent if "token_iteration" in key} | {"token_iterations": 0}
    level = _import(tmp_path, real)[0]
    assert level.requests["ttft_s"].isna().tolist() == [True] + [False] * 5
    for request in real["benchmarks"][0]["requests"]["successful"]:
        request["info"]["timings"] |= silent
    with pytest.raises(ValueError, match="without streaming"):
        _import(tmp_path, real)


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
