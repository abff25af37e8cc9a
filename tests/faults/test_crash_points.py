"""A sample of `make crash-points`: a kill and an I/O error at one operation of every stage without a server.

Servers, and training on two ranks, are killed in test_kills.py.
"""

import re
import shutil

import pytest

from tests.faults.power_loss import build, preloaded
from tests.scripts import run_python

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
STAGES = ("prompts", "regenerate", "harvest", "spool", "train", "online", "import", "report")
FAULTS = ("kill", "EIO")


def test_a_fault_at_any_operation_costs_nothing(fault_seed, tmp_path):
    options = ("--stage", *STAGES, "--fault", *FAULTS, "--sample", "1", "--seed", str(fault_seed))
    result = run_python("-m", "tests.faults.crash_points", *options, **preloaded(build(tmp_path)))
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    tried = re.findall(r"^(\w+) +(\w+) +1 of \d+ operations tried, 0 failed", result.stdout, re.MULTILINE)
    assert tried == [(stage, fault) for stage in STAGES for fault in FAULTS]
