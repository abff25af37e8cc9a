"""Describe the statements of a function one by one, in plain English.

Gives up: depth; only the outer level of the body and the first line of each block are told.
Alternative: unparse each statement into the answer, which any prompt-lookup drafter would copy for free.
"""

import ast

from tools.tiny.corpus import Function
from tools.tiny.wording import words_of

OPERATORS = {
    ast.Eq: "equals",
    ast.NotEq: "differs from",
    ast.Lt: "is below",
    ast.LtE: "is at most",
    ast.Gt: "is above",
    ast.GtE: "is at least",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "is in",
    ast.NotIn: "is missing from",
}


def steps_of(function: Function, most: int) -> list[str]:
    """Describe up to `most` statements in the imperative, without a final full stop."""
    return [step(statement) for statement in function.node.body[:most]]


def step(statement: ast.stmt) -> str:
    """Describe one statement in the imperative."""
    match statement:
        case ast.Assign(targets=[target, *_], value=value):
            return _assignment(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            return _assignment(target, value)
        case ast.AugAssign(target=target):
            return f"update {noun(target)} in place"
        case ast.Return(value=None) | ast.Return(value=ast.Constant(value=None)):
            return "return without a value"
        case ast.Return(value=ast.expr() as value):
            return f"return {noun(value)}"
        case ast.Raise(exc=None):
            return "raise the error again"
        case ast.Raise(exc=ast.expr() as error):
            return f"raise {_name(error.func if isinstance(error, ast.Call) else error)}"
        case ast.Expr(value=value):
            return _expression(value)
        case _:
            return _block(statement)


def _block(statement: ast.stmt) -> str:
    match statement:
        case ast.If(test=test, body=[first, *_]):
            return f"if {condition(test)}, {step(first)}"
        case ast.For(target=target, iter=iterable) | ast.AsyncFor(target=target, iter=iterable):
            return f"loop over {noun(iterable)} with {noun(target)}"
        case ast.While(test=test):
            return f"repeat while {condition(test)}"
        case ast.With(items=[item, *_]) | ast.AsyncWith(items=[item, *_]):
            return f"inside {noun(item.context_expr)}, work on"
        case ast.Try(body=[first, *_], handlers=handlers):
            guard = "and watch for errors" if handlers else "and clean up"
            return f"try to {step(first)} {guard}"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return f"define the helper `{name}`"
        case ast.Import(names=[alias, *_]) | ast.ImportFrom(names=[alias, *_]):
            return f"import `{alias.name}`"
        case ast.Assert(test=test):
            return f"make sure that {condition(test)}"
        case ast.Delete(targets=[target, *_]):
            return f"delete {noun(target)}"
        case ast.Global() | ast.Nonlocal():
            return "use an outer variable"
        case ast.Pass():
            return "do nothing"
        case ast.Break() | ast.Continue():
            return "leave the loop" if isinstance(statement, ast.Break) else "go on with the next one"
        case _:
            return "go on"


def _assignment(target: ast.expr, value: ast.expr) -> str:
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        return f"remember {noun(value)} as `{target.attr}`"
    return f"set {noun(target)} to {noun(value)}"


def _expression(value: ast.expr) -> str:
    match value:
        case ast.Await(value=inner):
            return f"wait for {noun(inner)}"
        case ast.Yield(value=ast.expr() as inner) | ast.YieldFrom(value=inner):
            return f"yield {noun(inner)}"
        case ast.Call(func=func):
            return f"call {_name(func)}"
        case _:
            return "evaluate an expression"


def condition(test: ast.expr) -> str:
    """Say when a test holds, as a clause."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"{noun(operand)} is false"
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return f"{noun(left)} {OPERATORS[type(operator)]} {noun(right)}"
        case ast.BoolOp(op=ast.And(), values=[first, *_]):
            return f"{condition(first)} and more holds"
        case ast.BoolOp(values=[first, *_]):
            return f"{condition(first)} or else"
        case ast.Call(func=func, args=[first, *_]):
            return f"{_name(func)} accepts {noun(first)}"
        case _:
            return f"{noun(test)} is true"


def noun(value: ast.expr) -> str:
    """Name the value of an expression in a few words."""
    match value:
        case ast.Name(id=name):
            return f"`{name}`"
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=attribute):
            return f"its {' '.join(words_of(attribute)) or attribute}"
        case ast.Attribute(attr=attribute):
            return f"the {' '.join(words_of(attribute)) or attribute}"
        case ast.Constant(value=str() as text):
            return "an empty text" if not text else "a fixed text"
        case ast.Constant(value=constant):
            return f"`{constant!r}`" if len(repr(constant)) < 8 else "a constant"
        case ast.Call(func=func):
            return f"the result of {_name(func)}"
        case ast.Await(value=inner):
            return f"the awaited {noun(inner).removeprefix('the ')}"
        case ast.Subscript(value=inner):
            return f"an item of {noun(inner)}"
        case _:
            return _literal(value)


def _literal(value: ast.expr) -> str:
    match value:
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            kind = {ast.Tuple: "tuple", ast.List: "list", ast.Set: "set"}[type(value)]
            return f"a {kind} of {len(elements)}" if elements else f"an empty {kind}"
        case ast.Dict(keys=keys):
            return "a dictionary" if keys else "an empty dictionary"
        case ast.BinOp() | ast.UnaryOp():
            return "a computed value"
        case ast.Compare() | ast.BoolOp():
            return "the outcome of a test"
        case ast.JoinedStr():
            return "a formatted text"
        case ast.IfExp():
            return "one of two values"
        case ast.Lambda():
            return "a small function"
        case _:
            return "a collected result"


def _name(func: ast.expr) -> str:
    match func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"`{name}`"
        case _:
            return "a computed function"
