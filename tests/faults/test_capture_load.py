"""200 requests at a time, preempted, in workers that are killed: the store is the undisturbed one's, byte for byte."""

import re

import pytest

from tests.faults.payload import leftovers
from tests.scripts import run_ok


@pytest.mark.slow
def test_preemption_and_kills_leave_no_trace_in_store_or_spool(tmp_path, fault_seed):
    said = run_ok("-m", "tests.engine.modelless", str(tmp_path), str(fault_seed))
    found = re.search(r"killed (\d+) and (\d+), store as undisturbed: (True|False), spool: (True|False)", said)
    assert found, said
    assert found[3] == found[4] == "True"
    assert int(found[1]), "no worker was killed"
    assert int(found[2]), "no harvester was killed"
    assert not [path for path in leftovers(tmp_path) if "undisturbed" not in path.parts]
