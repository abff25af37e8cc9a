"""A training step at gpt-oss-120b's size on fake CUDA tensors, with a budget for what a GPU would be asked to do."""

import json
import shutil

import pytest

from tests.public_targets import fill_hub
from tests.scripts import run_ok

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for a device that does nothing")
GIB = 2**30


RECOMPUTED = ("train.gradient_checkpointing=true", "head.sliding_window=128")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict]:
    """8,192 tokens in four documents, all rows in the loss: kept, recomputed; and where capturing waits."""
    hub = tmp_path_factory.mktemp("hub")
    fill_hub(hub)
    command = ("-m", "tests.gpu.fake_step", "configs/gpt-oss-120b.yaml", *RECOMPUTED)
    printed = run_ok(*command, HF_HUB_CACHE=str(hub), HF_HUB_OFFLINE="1")
    return [json.loads(line) for line in printed.splitlines()[-3:]]


@pytest.fixture
def step(measured) -> dict:
    return measured[0]


def test_device_and_types_hold_and_the_step_stays_within_its_budget(step):
    """That it runs shows that devices and types fit; gradients are checked on the way."""
    assert step["operations"] / 1e12 == pytest.approx(99.0, rel=0.01)
    assert step["launches"] <= 960
    assert step["moved"] / 1e9 <= 172
    assert step["peak"] / GIB <= 8.3, "beyond weights and target"
    assert step["seconds"] <= 0.180, "modelled for an H100"


def test_the_host_waits_for_the_device_nowhere_else(step):
    assert step["waits"] == {
        "layers.py:__call__ _to_copy": 1,  # frequencies of the rotary embedding, in the first step
        "trainer.py:step _to_copy": 1,  # once a step: the sums of all micro batches
    }


def test_a_batch_is_sent_beside_the_kernels(step):
    """On a stream of their own, out of page-locked memory, without which the host waits whatever non_blocking says; on
    the kernels' are the losses' scale and, in the first step, rotary frequencies."""
    assert step["sent"] == {"beside": 16, "between": 2}
    assert step["pinned"] == 16


def test_the_engine_waits_for_no_captured_rows(measured):
    assert measured[2] == {}


def test_recomputation_of_steps_halves_what_is_kept(measured, step):
    """Of a head with a sliding window, which the kernel is called with."""
    recomputed = measured[1]
    assert recomputed["waits"] == step["waits"]
    assert recomputed["peak"] < 0.6 * step["peak"]
    assert recomputed["operations"] / step["operations"] < 4 / 3
