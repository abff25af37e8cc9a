"""The two workloads with formal answers: `code` completes a function, `structured` writes JSON.

Gives up: long programs; a model of this size repeats itself after some ten lines of free code.
Alternative: complete the library's long bodies as well; they are what drives a small model into loops.
"""

import json
import random
from collections.abc import Callable

from tools.tiny.corpus import Function
from tools.tiny.explain import fenced
from tools.tiny.wording import called, purpose, raised, returns_value, words_of, yields

Maker = Callable[[Function], str]

COMPLETE = (
    "Complete this function.",
    "Fill in the body of `{name}`.",
    "Write the missing body.",
    "Implement `{name}`, which {purpose}.",
)
STORE = (
    "Write the `__init__` of a class that stores the arguments of this signature.",
    "I need a constructor that remembers these arguments.",
    "Turn the arguments into attributes of `{owner}`.",
)
WRAP = (
    "Write a wrapper around `{name}` that logs each call.",
    "I want a logged version of this function.",
    "Wrap `{name}` so that calls show up in the log.",
)
RECORD = (
    "Make a dataclass from these arguments.",
    "Replace the arguments by one dataclass.",
    "Write a dataclass `{owner}` with one field per argument.",
)
TRY_OUT = (
    "Write a unit test for `{name}`.",
    "Sketch a test case for this function.",
    "How would a first test of `{name}` look?",
)
SIGNATURE = ("Give me the signature as JSON.", "JSON of this signature, please.", "Describe `{name}` as JSON.")
SPLIT = (
    "Which arguments are required and which are optional? Answer in JSON.",
    "As JSON: required arguments, optional arguments, exceptions and calls.",
)
FACTS = ("List the facts about this function as a JSON object.", "Facts about `{name}` as indented JSON, please.")
MEANING = (
    "Say what each argument means, as JSON.",
    "I need a JSON object that maps the arguments of `{name}` to their meaning.",
)


def code(function: Function, choose: random.Random) -> tuple[str, str]:
    """Return a request for a few lines of code and its answer."""
    styles: list[tuple[tuple[str, ...], Maker]] = [(WRAP, wrapper), (TRY_OUT, unit_test)]
    if function.parameters:
        styles += [(STORE, constructor), (RECORD, record)]
    if len(function.source) < 180 and len(function.node.body) < 3 and "..." not in function.source:
        styles += [(COMPLETE, completion)] * 2
    phrases, answer = choose.choice(styles)
    request = choose.choice(phrases).format(name=function.name, owner=class_name(function), purpose=purpose(function))
    place = f"class {function.owner}: ...\n\n" if function.owner else ""
    hint = f'\n    """{function.summary}"""' if function.summary else ""
    return f"{request}\n\n{fenced(f'{place}{function.header}{hint}')}", fenced(answer(function))


def structured(function: Function, choose: random.Random) -> tuple[str, str]:
    """Return a request for a JSON object about a function and its answer."""
    styles: list[tuple[tuple[str, ...], Maker]] = [(FACTS, facts), (SPLIT, split)]
    if function.parameters:
        styles += [(SIGNATURE, signature), (MEANING, meaning)]
    phrases, answer = choose.choice(styles)
    request = choose.choice(phrases).format(name=function.name)
    return f"{request}\n\n{fenced(function.source)}", answer(function)


def class_name(function: Function) -> str:
    """Make a class name from the words of a function's name."""
    return "".join(word.capitalize() for word in words_of(function.name)) or "Call"


def completion(function: Function) -> str:
    """The library's own short body."""
    return function.source


def constructor(function: Function) -> str:
    """A class that stores every argument under its own name."""
    names = [p.name for p in function.parameters[:4]]
    lines = [f"        self.{name} = {name}" for name in names]
    header = f"    def __init__(self, {', '.join(names)}):"
    return "\n".join([f"class {class_name(function)}:", header, *lines])


def wrapper(function: Function) -> str:
    """A function that logs its arguments and the result around the call."""
    short = " ".join(words_of(function.name)) or "call"
    subject = f"{function.owner.lower()}.{function.name}" if function.owner else function.name
    call = f"{subject}(*args, **kwargs)"
    lines = [f"def logged_{function.name.strip('_')}(*args, **kwargs):", f'    logger.info("about to {short}")']
    if returns_value(function):
        lines += [f"    result = {call}", '    logger.debug("got %r", result)', "    return result"]
    else:
        lines += [f"    {call}", '    logger.debug("done")']
    return "\n".join(lines)


def record(function: Function) -> str:
    """A dataclass with one field per argument; defaults become defaults."""
    lines = ["@dataclass", f"class {class_name(function)}:", f'    """Arguments of `{function.name}`."""', ""]
    for parameter in function.parameters[:4]:
        default = f" = {parameter.default}" if parameter.default is not None else ""
        lines.append(f"    {parameter.name}: {_type(parameter.default, parameter.star)}{default}")
    return "\n".join(lines)


def unit_test(function: Function) -> str:
    """One test method that builds the arguments and checks the outcome."""
    name = function.name.strip("_")
    names = [p.name for p in function.parameters if p.default is None and not p.star][:3]
    lines = [f"class Test{class_name(function)}(unittest.TestCase):", f"    def test_{name}(self):"]
    lines += [f"        {n} = make_{n.strip('_')}()" for n in names]
    subject = f"self.{function.owner.lower().strip('_')}.{function.name}" if function.owner else function.name
    call = f"{subject}({', '.join(names)})"
    errors = raised(function)
    if errors:
        return "\n".join([*lines, f"        with self.assertRaises({errors[0]}):", f"            {call}"])
    check = f"self.assertIsNotNone({call})" if returns_value(function) else call
    return "\n".join([*lines, f"        {check}"])


def signature(function: Function) -> str:
    """The name and each parameter with its default."""
    values = {p.name: _state(p.default, p.star) for p in function.parameters[:6]}
    return json.dumps({"name": function.name, "parameters": values, "returns": returns_value(function)})


def split(function: Function) -> str:
    """Required and optional names, exceptions and calls."""
    names = function.parameters[:6]
    sides = {
        "required": [p.name for p in names if p.default is None and not p.star],
        "optional": [p.name for p in names if p.default is not None],
        "raises": raised(function)[:2],
        "calls": called(function)[:3],
    }
    return json.dumps(sides)


def facts(function: Function) -> str:
    """Counts and flags, one per line."""
    counts = {
        "kind": "method" if function.owner else "function",
        "words": words_of(function.name),
        "arguments": len(function.parameters),
        "statements": len(function.node.body),
        "generator": yields(function),
        "raises": next(iter(raised(function)), None),
        "purpose": purpose(function),
    }
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in counts.items()) + "\n}"


def meaning(function: Function) -> str:
    """The arguments with type and words; flat, because nested objects repeat the same tokens."""
    named = [p for p in function.parameters if not p.star][:5]
    described = {p.name: f"{_json_type(p.default)}, {' '.join(words_of(p.name))}" for p in named}
    return json.dumps({"call": function.name, "purpose": purpose(function), "arguments": described})


def _state(default: str | None, star: str) -> str:
    return "variable" if star else "required" if default is None else default


def _type(default: str | None, star: str) -> str:
    if star:
        return "tuple" if star == "*" else "dict"
    return {"string": "str", "integer": "int", "boolean": "bool"}.get(_json_type(default), "object")


def _json_type(default: str | None) -> str:
    if default in {"True", "False"}:
        return "boolean"
    if default is not None and default.lstrip("-").isdigit():
        return "integer"
    return "string" if default is not None and default[0] in "'\"" else "any"
