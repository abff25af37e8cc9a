"""200 requests at a time, preempted, in workers that are killed: the store is the undisturbed one's, byte for byte."""

import pytest

from tests.faults.payload import leftovers
from tests.scripts import run_ok


@pytest.mark.slow
def test_preemption_and_kills_leave_no_trace_in_store_or_spool(tmp_path, fault_seed):
    run_ok("-m", "tests.engine.modelless", str(tmp_path), str(fault_seed))
    assert not leftovers(tmp_path)
