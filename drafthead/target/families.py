"""What the installed transformers and vLLM know of a model family, read from their source files.

Importing them takes 3 to 20 seconds. What is asked here, the default of a key and the bases of a class, stands in the
source and costs a tenth of a second. What this gives up: values that a class computes when it is made. Tests compare
the answers for all families with the imported classes.
"""

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_CONFIGS, _MODELS = "transformers.models", "vllm.model_executor.models"
_MAPPINGS = _CONFIGS + ".auto.auto_mappings"
_CAPTURES = "SupportsEagle3"  # the interface of vLLM's classes that give out hidden states
_WRAPPER = "TransformersForCausalLM"  # vLLM's class for a model that only transformers has
_Class = tuple[str, str]  # module and name


# ---- transformers ----


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the language model that a config.json describes, in one level and with those that it leaves out.

    Published files hold only what differs from the family's defaults, and multimodal ones nest the language model in
    `text_config`.
    """
    text = config.get("text_config", {})
    outer = _config_class(config.get("model_type"))
    inner = _config_class(text.get("model_type")) or _text_class(outer)
    defaults, stated = {**_values(outer), **_values(inner)}, {**config, **text}
    defaults.pop("tie_word_embeddings", None)  # the checkpoint itself tells
    if stated.get("rope_scaling"):  # the older form takes the place of the family's own rotation
        defaults.pop("rope_parameters", None)
    if isinstance(theta := defaults.get("default_theta"), dict):  # by kind of layer
        theta = theta.get("full_attention", theta.get("global"))
    return {"rope_theta": theta, **defaults, **stated} if theta else {**defaults, **stated}


def _config_class(model_type: object) -> _Class | None:
    mappings = _names(_MAPPINGS)
    names, folders = (
        dict(ast.literal_eval(mappings[name][0].value.args[0])) if mappings else {}  # OrderedDict([...])
        for name in ("CONFIG_MAPPING_NAMES", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    )
    if not isinstance(model_type, str) or model_type not in names:
        return None
    folder = folders.get(model_type, model_type.replace("-", "_"))
    return f"{_CONFIGS}.{folder}.configuration_{folder}", names[model_type]


def _text_class(outer: _Class | None) -> _Class | None:
    """The class that a multimodal config class has for its language model, whose keys old files do not nest."""
    for statement in _body(outer):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "sub_configs":
            assert outer is not None
            parts = ast.unparse(statement.value).strip("{}").split(", ")
            name = dict(part.split(": ", 1) for part in parts).get("'text_config'")
            return (outer[0], name) if name else None
    return None


def _literal(node: ast.expr) -> Any:
    """The value of an expression without names; raises ValueError where there are any."""
    if isinstance(node, ast.BinOp):  # 4096 * 32
        left, right = _literal(node.left), _literal(node.right)
        return left * right if isinstance(node.op, ast.Mult) else ast.literal_eval(node)
    return ast.literal_eval(node)


def _values(of: _Class | None) -> dict[str, Any]:
    """Name -> value of a class's attributes that are written out in its body or a base's."""
    values: dict[str, Any] = {}
    for statement in _body(of):
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                with suppress(ValueError):  # one that is computed
                    values.setdefault(name, _literal(value))
    return values


# ---- vLLM ----


def gives_hidden_states(architectures: Sequence[str]) -> bool | None:
    """Whether the installed vLLM hands out the hidden states of a model, as harvesting and drafting need.

    Args:
        architectures: architectures named by the target's config.json; the first that vLLM has is taken.

    Returns:
        None: there is no vLLM here, or a plugin of it may have the class.
    """
    if not _path(_MODELS + ".registry").is_file():
        return None
    models = _registered()
    known = next((name for name in architectures if name in models), None)
    if known is None and any(not p.value.startswith("vllm.") for p in entry_points(group="vllm.general_plugins")):
        return None
    return _inherits(models[known or _WRAPPER], _CAPTURES)


@cache
def _registered() -> dict[str, _Class]:
    """Architecture -> module and class, of the tables in vLLM's registry."""
    classes: dict[str, _Class] = {}
    for node in ast.walk(ast.parse(_path(_MODELS + ".registry").read_bytes())):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                module, name = ast.literal_eval(value)
                classes[str(key.value)] = (module if module.startswith("vllm.") else f"{_MODELS}.{module}", name)
    return classes


@cache
def _inherits(of: _Class, base: str) -> bool:
    """Whether a class of this name is among the bases, on whichever platform."""
    return of[1] == base or any(_inherits(parent, base) for definition in _definitions(of) for parent in definition[1])


# ---- Source files ----


def _body(of: _Class | None) -> Iterator[ast.stmt]:
    """The statements of a class and of its bases, nearest first."""
    for definition, parents in _definitions(of) if of else ():
        yield from definition.body
        for parent in parents:
            yield from _body(parent)


def _definitions(of: _Class) -> list[tuple[ast.ClassDef, list[_Class]]]:
    """The statements that define a name, followed through imports, each with the bases; several where a package takes
    another file on each platform."""
    module, name = of
    definitions = []
    for statement in _names(module).get(name, ()):
        match statement:
            case ast.ClassDef(bases=bases):
                words = (ast.unparse(base).partition("[")[0] for base in bases)
                definitions.append((statement, [(module, word) for word in words]))
            case ast.ImportFrom(module=source, level=level, names=aliases):
                original = next(alias.name for alias in aliases if (alias.asname or alias.name) == name)
                package = module if _path(module).name == "__init__.py" else module.rpartition(".")[0]
                for _ in range(level - 1):
                    package = package.rpartition(".")[0]
                where = f"{package}.{source}".strip(".") if level else str(source)
                definitions += _definitions((where.removesuffix(".None"), original))
            case ast.Assign(value=ast.Name(id=other)) if other != name:
                definitions += _definitions((module, other))
    return definitions


@cache
def _names(module: str) -> dict[str, list[Any]]:
    """Name -> the statements at the top of a module, and within its conditions, that bind it; empty where there is no
    such module."""
    bindings: dict[str, list[Any]] = {}
    path = _path(module)
    statements: list[ast.stmt] = ast.parse(path.read_bytes()).body if path.is_file() else []
    while statements:
        match statement := statements.pop(0):
            case ast.If(body=body, orelse=other) | ast.Try(body=body, orelse=other):
                statements += body + other
            case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                bindings.setdefault(name, []).append(statement)
            case ast.Assign(targets=[ast.Name(id=name)]):
                bindings.setdefault(name, []).append(statement)
            case ast.ImportFrom(names=aliases):
                for alias in aliases:
                    bindings.setdefault(alias.asname or alias.name, []).append(statement)
    return bindings


@cache
def _path(module: str) -> Path:
    """A module's file; only its topmost package is looked up, which imports nothing."""
    top, _, inner = module.partition(".")
    spec = find_spec(top)
    folder = Path(spec.origin).parent if spec and spec.origin else Path("/nowhere")
    path = folder.joinpath(*inner.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
