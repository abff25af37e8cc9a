"""Read functions and classes from the running Python's standard library with `ast`.

Gives up: C modules and the few packages in `SKIPPED_PACKAGES` (tests, tools, and tkinter's 1,000 alike wrappers).
Alternative: a downloaded code corpus; it would cost the recipe its "runs offline, same result" property.
"""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SKIPPED_PACKAGES = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "ensurepip", "pydoc_data", "tkinter"}
)
# Fixed rule: every prompt from these top-level modules is held out, every other module is for training.
HELDOUT_MODULES = (
    "argparse",
    "calendar",
    "configparser",
    "csv",
    "fractions",
    "gzip",
    "heapq",
    "ipaddress",
    "mailbox",
    "pathlib",
    "plistlib",
    "queue",
    "sched",
    "shelve",
    "statistics",
    "tarfile",
    "tempfile",
    "textwrap",
    "uuid",
    "wave",
    "zipfile",
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Parameter:
    """One parameter of a signature; `default` is its source text, `star` is '', '*' or '**'."""

    name: str
    default: str | None = None
    star: str = ""


@dataclass(frozen=True, eq=False)
class Function:
    """A function or method: its place, its signature and its syntax tree without the docstring."""

    module: str
    owner: str
    node: FunctionNode
    summary: str

    @property
    def name(self) -> str:
        """The bare name, without class or module."""
        return self.node.name

    @cached_property
    def parameters(self) -> list[Parameter]:
        """The parameters a caller passes: `self` and `cls` of a method are left out."""
        described = _parameters(self.node.args)
        if self.owner and described and described[0].name in {"self", "cls"}:
            return described[1:]
        return described

    @cached_property
    def header(self) -> str:
        """The `def` line alone."""
        prefix = "async def" if isinstance(self.node, ast.AsyncFunctionDef) else "def"
        return f"{prefix} {self.name}({ast.unparse(self.node.args)}):"

    @property
    def body(self) -> str:
        """The statements, indented by four spaces."""
        text = "\n".join(ast.unparse(statement) for statement in self.node.body)
        return "\n".join(f"    {line}" if line else "" for line in text.splitlines())

    @cached_property
    def source(self) -> str:
        """Header and body as one normalised text, without comments and docstring."""
        return f"{self.header}\n{self.body}"


@dataclass(frozen=True)
class Class:
    """A class: its bases and methods; attributes of the body are left out."""

    module: str
    name: str
    bases: tuple[str, ...]
    methods: tuple[Function, ...]

    @property
    def header(self) -> str:
        """The `class` line alone."""
        return f"class {self.name}({', '.join(self.bases)}):" if self.bases else f"class {self.name}:"


def is_heldout(module: str) -> bool:
    """Tell whether prompts from this dotted module name belong to the held-out split."""
    return module.split(".")[0] in HELDOUT_MODULES


def read_library(root: Path | None = None) -> tuple[list[Function], list[Class]]:
    """Return every function and class below `root` (default: this Python's library), in a fixed order."""
    root = root or Path(sysconfig.get_path("stdlib"))
    functions: list[Function] = []
    classes: list[Class] = []
    for path, module in _modules(root):
        tree = ast.parse(path.read_bytes())
        _collect(tree, module, "", functions, classes)
    if not functions:
        raise ValueError(f"no Python source below {root}: install Python with its standard library's source")
    return functions, classes


def _modules(root: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_PACKAGES.intersection(parts) or any("-" in part for part in parts):
            continue
        # Generated per build machine, so it would make the corpus depend on who compiled Python.
        if parts[0].startswith("_sysconfigdata"):
            continue
        yield path, ".".join(parts).removesuffix(".__init__")


def _collect(tree: ast.AST, module: str, owner: str, functions: list[Function], classes: list[Class]) -> list[Function]:
    """Append what `tree` defines, nested classes included, and return its direct functions."""
    direct: list[Function] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FunctionNode):
            function = _function(node, module, owner)
            functions.append(function)
            direct.append(function)
        elif isinstance(node, ast.ClassDef):
            methods = _collect(node, module, node.name, functions, classes)
            bases = tuple(ast.unparse(base) for base in node.bases)
            classes.append(Class(module, node.name, bases, tuple(methods)))
        elif isinstance(node, ast.If | ast.Try):
            direct.extend(_collect(node, module, owner, functions, classes))
    return direct


def _function(node: FunctionNode, module: str, owner: str) -> Function:
    docstring = ast.get_docstring(node) or ""
    if docstring:
        node.body = node.body[1:] or [ast.Pass()]
    return Function(module, owner, node, _first_sentence(docstring))


def _first_sentence(docstring: str) -> str:
    """The first sentence of a docstring on one line, or '' when it is not plain short English."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = paragraph.split(". ")[0].rstrip(".")
    plain = sentence.isascii() and 3 <= len(sentence.split()) <= 18 and not set(sentence) & set("<>{}[]|=\\")
    return f"{sentence}." if plain and sentence[0].isupper() else ""


def _parameters(arguments: ast.arguments) -> list[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    described = [_parameter(a, d) for a, d in zip(positional, missing + list(arguments.defaults), strict=True)]
    if arguments.vararg:
        described.append(Parameter(arguments.vararg.arg, star="*"))
    described += [_parameter(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        described.append(Parameter(arguments.kwarg.arg, star="**"))
    return described


def _parameter(argument: ast.arg, default: ast.expr | None) -> Parameter:
    return Parameter(argument.arg, ast.unparse(default) if default is not None else None)
