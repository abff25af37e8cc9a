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
STAGES = {"generation", "training", "exporting", "evaluation"}
ALLOWED = {
    **dict.fromkeys(FOUNDATIONS, FOUNDATIONS),
    "losses": FOUNDATIONS,
    "target": FOUNDATIONS,
    "drafters": {"losses", "target", *FOUNDATIONS},
    "data": {"drafters", "losses", "target", *FOUNDATIONS},
    "engine": {"data", "drafters", "losses", "target", *FOUNDATIONS},
    **{stage: {"engine", "data", "drafters", "losses", "target", *FOUNDATIONS} for stage in STAGES},
    **{
        above: {*STAGES, "engine", "data", "drafters", "losses", "target", *FOUNDATIONS}
        for above in ("planning", "adapting")
    },
}
SECTIONS = {
    "drafthead.drafters.registry", "drafthead.drafters.registry.Head", "drafthead.drafters.registry.section_of",
    "drafthead.drafters.config",
    "drafthead.drafters.config.HeadConfig",
}  # fmt: skip
# Within a stage: sub-packages from the lowest up; modules of the stage's own folder lie below all of them.
WITHIN = {
    "evaluation": ("", "measuring", "results", "decision", "reporting"),
}


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer they cross"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def layer_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0].removesuffix(".py")
    if own == "__init__":
        return
    used = {layer_of(name) for name in imported_names(path) if name.startswith("drafthead.")}
    # A drafter owns its section of the recipe, and the registry names them all without torch.
    if own == "config" and {n for n in imported_names(path) if n.startswith("drafthead.drafters")} <= SECTIONS:
        used -= {"drafters"}
    forbidden = used - {own, ""} - ALLOWED[own]
    assert not forbidden, f"{relative} ({own}) imports {sorted(forbidden)}, which is not below it"


@pytest.mark.parametrize("stage", sorted(WITHIN))
def test_imports_point_down_within_a_stage(stage):
    order = WITHIN[stage]
    for path in sorted((PACKAGE / stage).rglob("*.py")):
        inside = path.relative_to(PACKAGE / stage).parts
        own = inside[0] if len(inside) > 1 else ""
        for name in imported_names(path):
            used = name.split(".")[2:] if name.startswith(f"drafthead.{stage}.") else []
            layer = used[0] if used and used[0] in order else ""
            assert order.index(layer) <= order.index(own), f"{path} ({own}) imports {name}, which is not below it"


def test_the_rule_names_every_layer_there_is():
    found = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    found |= {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("layers", "absent"),
    [
        (("losses", "target", "drafters"), ("vllm", "deepspeed", "accelerate", "triton")),
        (("data", "training"), ("vllm",)),
    ],
)
def test_lower_layers_import_without_engines(layers, absent):
    modules = [
        ".".join(path.relative_to(REPO_ROOT).with_suffix("").parts)
        for layer in layers
        for path in sorted((PACKAGE / layer).glob("*.py"))
        if path.name not in ("__init__.py", "kernels.py")  # kernels: imported by losses.fused on CUDA only
    ]
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in absent)
    program = f"import sys; {blocked}import importlib; [importlib.import_module(m) for m in {modules!r}]"
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr


def test_the_library_does_not_import_what_uses_it():
    for path in PACKAGE.rglob("*.py"):
        used = {name.split(".")[0] for name in imported_names(path)}
        assert not used & {"tools", "tests", "benchmarks", "data_gen", "train", "export", "eval"}, path


def test_no_recipe_script_shadows_a_library():
    scripts = [p.stem for folder in ("data_gen", "train", "export", "eval") for p in (REPO_ROOT / folder).glob("*.py")]
    taken = set(sys.stdlib_module_names) | {"datasets", "vllm", "wandb", "accelerate", "torch", "transformers"}
    assert not set(scripts) & taken


@pytest.mark.parametrize("first", ["drafters.registry", "drafters.base", "drafters.eagle3.config", "config"])
def test_recipe_and_drafters_import_in_any_order(first):
    """The recipe's head section is a drafter's: whichever is imported first must not find the other half done."""
    assert run_python("-c", f"import drafthead.{first}").returncode == 0
