"""Turn Python names and expressions into English phrases, by rules alone.

Gives up: meaning that is only in the body; "`parse_rate`" becomes "parses the rate", whatever the body does.
Alternative: have a large model write the answers; then the recipe could no longer run offline from scratch.
"""

import ast
import re
from functools import cache

from tools.tiny.corpus import Function

# First words of function names that are verbs; anything else is read as a noun.
_VERB_TEXT = """
accept acquire add adjust allow append apply assert assign attach begin bind break build cache call
cancel change check clean clear close collect combine compare compile compute connect consume convert
copy count create debug decode define delete describe detach detect disable discard dispatch display do
drain drop dump emit enable encode end ensure enter escape evaluate exec execute exit expand extend
extract feed fetch fill filter find finish fix flatten flush forget format freeze generate get give grow
handle hash identify ignore import increment indent infer init insert inspect install invoke iter join
keep kill list listen load locate log lookup make map mark match merge mock modify move need normalize
notify open order pack parse patch pause peek perform pick pop post prepare prepend print process push
put quit quote raise read rebuild receive record recv reduce refresh register reject release reload
remove rename render repeat replace report request reset resize resolve restore resume retrieve return
reverse rotate run save scan schedule search seek select send serve set setup shift show shut shutdown
skip sleep sort split start stop store strip submit subtract swap switch sync take tell terminate test
throw toggle touch trace track transform translate truncate try undo unescape unpack unquote unregister
update use validate verify visit wait walk warn watch wrap write yield
"""
VERBS = frozenset(_VERB_TEXT.split())
QUESTION_WORDS = frozenset({"is", "has", "can", "should", "are", "was", "supports", "needs"})
SPECIAL_METHODS = {
    "__init__": "sets up a new instance",
    "__new__": "creates the instance itself",
    "__repr__": "builds the text shown in the console",
    "__str__": "builds the readable text",
    "__len__": "counts the elements",
    "__iter__": "starts an iteration",
    "__next__": "gives the next element",
    "__enter__": "enters the with block",
    "__exit__": "leaves the with block",
    "__eq__": "compares two objects for equality",
    "__hash__": "computes the hash",
    "__call__": "makes the object callable",
    "__contains__": "tests for membership",
    "__getitem__": "looks up one item",
    "__setitem__": "stores one item",
    "__delitem__": "deletes one item",
    "__getattr__": "finds a missing attribute",
    "__setattr__": "stores an attribute",
    "__del__": "cleans up at the end",
    "__bool__": "gives the truth value",
    "__reduce__": "prepares the object for pickling",
}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def words_of(name: str) -> list[str]:
    """Split a snake_case or CamelCase name into lower-case words."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name.replace("_", " "))
    return spaced.lower().split()


def third_person(verb: str) -> str:
    """Inflect a verb: get, gets; try, tries; push, pushes."""
    if verb in {"do", "go"}:
        return f"{verb}es"
    if verb.endswith("y") and verb[-2] not in "aeou":
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "x", "z", "sh", "ch")) else f"{verb}s"


def purpose(function: Function) -> str:
    """Say what the name promises, as a verb phrase in the third person."""
    if function.name in SPECIAL_METHODS:
        return SPECIAL_METHODS[function.name]
    words = words_of(function.name)
    if not words:
        return "does its work under a name of underscores"
    first, rest = words[0], " ".join(words[1:])
    if first in VERBS:
        return f"{third_person(first)} the {rest}" if rest else f"{third_person(first)} {_object(function)}"
    if first in QUESTION_WORDS and rest:
        return f"tells if the {_subject(function)} {first} {rest}"
    if first in {"on", "handle", "cb"} and rest:
        return f"reacts to the {rest} event"
    if first in {"to", "as", "from"} and rest:
        return f"converts {first} {rest}"
    return f"{'works out' if returns_value(function) else 'takes care of'} the {' '.join(words)}"


def _object(function: Function) -> str:
    parameters = function.parameters
    return f"the given {' '.join(words_of(parameters[0].name)) or 'value'}" if parameters else _own(function)


def _own(function: Function) -> str:
    return f"this {' '.join(words_of(function.owner))}" if function.owner else "what it needs"


def _subject(function: Function) -> str:
    return " ".join(words_of(function.owner)) or "value" if function.owner else "value"


def count(number: int, noun: str) -> str:
    """Write a count: 'no arguments', 'one argument', 'three arguments'."""
    word = NUMBERS[number] if number < len(NUMBERS) else "many"
    return f"{word} {noun}" if number == 1 else f"{word} {noun}s"


def listed(items: list[str]) -> str:
    """Join names with commas and a final 'and', each in backquotes."""
    quoted = [f"`{item}`" for item in items]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


@cache
def own_nodes(function: Function) -> list[ast.AST]:
    """Every node of the body, without the inside of nested functions and classes."""
    pending: list[ast.AST] = list(function.node.body)
    nodes: list[ast.AST] = []
    while pending:
        node = pending.pop(0)
        nodes.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))
    return nodes


def returns_value(function: Function) -> bool:
    """Tell whether some `return` of the function carries a value other than None."""
    return any(
        isinstance(node, ast.Return)
        and node.value is not None
        and not (isinstance(node.value, ast.Constant) and node.value.value is None)
        for node in own_nodes(function)
    )


def yields(function: Function) -> bool:
    """Tell whether the function is a generator."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(function))


@cache
def raised(function: Function) -> list[str]:
    """Names of the exceptions raised in the body, in order, without duplicates."""
    names: list[str] = []
    for node in own_nodes(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            target = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(target).split(".")[-1]
            if name.isidentifier() and name[0].isupper() and name not in names:
                names.append(name)
    return names


@cache
def called(function: Function) -> list[str]:
    """Last part of the names of called functions, in order, without duplicates."""
    names: list[str] = []
    for node in own_nodes(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name not in names and name not in raised(function):
                names.append(name)
    return names
