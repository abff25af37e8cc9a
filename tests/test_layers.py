"""The import rule: recipes, then stages that never import each other, then down to the foundations."""

import ast
import sys
from pathlib import Path

import pytest

from drafthead.config import REPO_ROOT
from tests.scripts import run_python

PACKAGE = REPO_ROOT / "drafthead"
FOUNDATIONS = {
    "config", "artifacts", "files", "locks", "processes", "progress", "cli", "statistics", "tracking", "section",
}  # fmt: skip
# From the lowest up: what imports those below its own layer. Only foundations import one another.
LAYERS = (
    FOUNDATIONS, {"losses", "target"}, {"drafters"}, {"data"}, {"engine"},
    {"generation", "training", "exporting", "evaluation"}, {"preflight"}, {"planning", "adapting"},
)  # fmt: skip
SECTIONS = {
    "drafthead.drafters.registry", "drafthead.drafters.registry.Head", "drafthead.drafters.registry.section_of",
    "drafthead.drafters.config", "drafthead.drafters.config.HeadConfig",
}  # fmt: skip
USERS = {"tools", "tests", "benchmarks", "data_gen", "train", "export", "eval"}
# Sub-packages of evaluation from the lowest up; modules of its own folder lie below all of them.
EVALUATION = ("", "measuring", "results", "decision", "reporting")


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer they cross"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def test_imports_point_down():
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        names = imported_names(path)
        assert not {name.split(".")[0] for name in names} & USERS, path
        used = {name.split(".")[1] for name in names if name.startswith("drafthead.")}
        # A drafter owns its section of the recipe, and the registry names them all without torch.
        if part == "config" and {name for name in names if name.startswith("drafthead.drafters")} <= SECTIONS:
            used -= {"drafters"}
        rank = next(i for i, layer in enumerate(LAYERS) if part in layer)
        forbidden = used - {part} - FOUNDATIONS.union(*LAYERS[:rank])
        assert not forbidden, f"{path} imports {sorted(forbidden)}, which is not below it"


def test_imports_point_down_within_evaluation():
    for path in (PACKAGE / "evaluation").rglob("*.py"):
        inside = path.relative_to(PACKAGE / "evaluation").parts
        part = inside[0] if len(inside) > 1 else ""
        for name in imported_names(path):
            used = name.split(".")[2:] if name.startswith("drafthead.evaluation.") else []
            layer = used[0] if used and used[0] in EVALUATION else ""
            assert EVALUATION.index(layer) <= EVALUATION.index(part), f"{path} imports {name}, which is not below it"


def test_lower_layers_import_without_engines():
    blocked = "vllm", "deepspeed", "accelerate", "triton"
    steps = [f"import importlib, sys; sys.modules |= dict.fromkeys({blocked!r})"]
    for layer in ("losses", "target", "drafters", "data", "training"):
        if layer == "data":
            steps.append("[sys.modules.pop(name) for name in ('deepspeed', 'accelerate', 'triton')]")
        modules = [path.stem for path in sorted((PACKAGE / layer).glob("*.py"))]
        modules = [name for name in modules if name not in ("__init__", "kernels")]  # kernels: on CUDA only
        steps += [f"importlib.import_module('drafthead.{layer}.{name}')" for name in modules]
    result = run_python("-c", "; ".join(steps))
    assert result.returncode == 0, result.stderr


def test_no_recipe_script_shadows_a_library():
    scripts = [p.stem for folder in ("data_gen", "train", "export", "eval") for p in (REPO_ROOT / folder).glob("*.py")]
    taken = set(sys.stdlib_module_names) | {"datasets", "vllm", "wandb", "accelerate", "torch", "transformers"}
    assert not set(scripts) & taken


@pytest.mark.parametrize("first", ["drafters.registry", "drafters.eagle3.config"])
def test_recipe_and_drafters_import_in_any_order(first):
    """The recipe's head section is a drafter's: whichever is imported first must not find the other half done."""
    assert run_python("-c", f"import drafthead.{first}").returncode == 0
