"""The two prose workloads: `chat` explains one short function, `long` sums up a longer source.

Gives up: free-form answers; every sentence follows from the syntax tree or from the docstring.
Alternative: answer with the docstring alone; a head would then see one kind of text per request.
"""

import random

from tools.tiny.corpus import Class, Function
from tools.tiny.steps import step, steps_of
from tools.tiny.wording import (
    called,
    count,
    listed,
    purpose,
    raised,
    returns_value,
    third_person,
    words_of,
    yields,
)

EXPLAIN = (
    "What does `{name}` do?",
    "Explain this function in a few sentences.",
    "Can you explain `{name}` to me?",
    "Describe the purpose of `{name}` for a new colleague.",
    "I found this in a library. What is it for?",
)
STEPS = (
    "Walk me through `{name}` step by step.",
    "List the steps of this function.",
    "What happens, in order, when `{name}` runs?",
    "Give me a numbered list of what the body does.",
)
STORY = (
    "In one sentence, how does `{name}` work?",
    "Tell me briefly how this function works.",
    "How does `{name}` get its job done? Keep it short.",
)
TABLE = (
    "Make a table of the arguments of `{name}`.",
    "Show the arguments as a Markdown table.",
    "Which arguments does `{name}` take? Answer with a table.",
)
DOCSTRING = (
    "Write a docstring for `{name}`.",
    "This function has no documentation. Write some.",
    "Suggest a good docstring.",
)
SUMMARY = (
    "Summarise this source.",
    "What is in this code? Give a short overview.",
    "I have no time to read all of this. Sum it up.",
    "Give me the main points of this code.",
)


def chat(function: Function, choose: random.Random) -> tuple[str, str]:
    """Return a request about a short function and its answer."""
    styles = [(EXPLAIN, explanation), (STEPS, numbered), (STORY, story)]
    if function.parameters:
        styles.append((TABLE, table))
    if function.summary:
        styles.append((DOCSTRING, docstring))
    phrases, answer = choose.choice(styles)
    request = choose.choice(phrases).format(name=function.name)
    return f"{request}\n\n{fenced(function.source)}", answer(function)


def explanation(function: Function) -> str:
    """Say what a function is for, what it takes and what comes out of it."""
    owner = f" of `{function.owner}`" if function.owner else ""
    kind = "method" if function.owner else "function"
    calls = called(function)
    sentences = [
        f"The {kind} `{function.name}`{owner} {purpose(function)}.",
        f"{_takes(function)} {_outcome(function)}",
        f"On the way it relies on {listed(calls[:2])}." if calls else "It needs no other function.",
    ]
    if function.summary:
        sentences.insert(1, f"In short: {function.summary}")
    return " ".join(sentences)


def numbered(function: Function) -> str:
    """List the first two steps and the last one, each starting with a capital letter."""
    steps = steps_of(function, most=2)
    hidden = len(function.node.body) - 3
    if hidden >= 0:
        between = f"after {count(hidden, 'more step')}, " if hidden else "finally, "
        steps.append(between + step(function.node.body[-1]))
    return "\n".join(f"{i}. {text[0].upper()}{text[1:]}." for i, text in enumerate(steps, 1))


def story(function: Function) -> str:
    """Tell up to three steps in one sentence."""
    steps = steps_of(function, most=3)
    glue = ["It is simple:", ", then", ", and finally"] if len(steps) < 3 else ["First,", ", then", ", and finally"]
    told = "".join(f"{glue[i]} {text}" for i, text in enumerate(steps))
    return f"`{function.name}` {purpose(function)}. {told}."


def table(function: Function) -> str:
    """Show each argument with its meaning and its default."""
    rows = ["| Argument | Meaning | Default |", "|---|---|---|"]
    for parameter in function.parameters[:5]:
        meaning = " ".join(words_of(parameter.name)) or "unused"
        star = {"": "", "*": "more ", "**": "named "}[parameter.star]
        default = "required" if parameter.default is None else f"`{parameter.default}`"
        rows.append(f"| `{parameter.name}` | {star}{meaning} | {'any number' if star else default} |")
    return "\n".join(rows)


def docstring(function: Function) -> str:
    """Give the library's own summary line, followed by the arguments and the result."""
    lines = [f'"""{function.summary}', ""]
    for parameter in function.parameters[:4]:
        optional = ", optional" if parameter.default is not None else ""
        lines.append(f":param {parameter.name}: {' '.join(words_of(parameter.name)) or 'unused'}{optional}")
    lines += [f":raises {name}: if it cannot go on" for name in raised(function)[:1]]
    lines.append(f":returns: {_result(function)}")
    return "\n".join([*lines, '"""'])


def long_function(function: Function, choose: random.Random) -> tuple[str, str]:
    """Return a request to sum up a long function and its answer."""
    errors = raised(function)
    calls = called(function)
    lines = [
        f"`{function.name}` {purpose(function)}. {_takes(function)}",
        "",
        f"It opens like this: {step(function.node.body[0])}. At the very end: {step(function.node.body[-1])}.",
        f"Much of the work is left to `{calls[0]}`." if calls else "No other function is called.",
        f"Callers should expect `{errors[0]}`." if errors else _outcome(function),
    ]
    return f"{choose.choice(SUMMARY)}\n\n{fenced(function.source)}", "\n".join(lines)


def long_class(owner: Class, source: str, choose: random.Random) -> tuple[str, str]:
    """Return a request to sum up the first methods of a class and its answer.

    Each method gets a sentence of its own shape: a list of equal lines is what a small model repeats.
    """
    shown = [method for method in owner.methods if f"def {method.name}(" in source]
    base = f", a kind of `{owner.bases[0]}`," if owner.bases else ""
    lines = [
        f"The class `{owner.name}`{base} stands for the {' '.join(words_of(owner.name))}.",
        "",
        f"Its first method, `{shown[0].name}`, {purpose(shown[0])}.",
    ]
    if len(shown) > 2:
        lines.append(f"Next comes `{shown[1].name}`, which {purpose(shown[1])}.")
    if len(shown) > 1:
        lines.append(f"The last one shown is `{shown[-1].name}`. That makes {count(len(shown), 'method')} in all.")
    return f"{choose.choice(SUMMARY)}\n\n{fenced(source)}", "\n".join(lines)


def fenced(source: str) -> str:
    """Put Python source into a Markdown fence."""
    return f"```python\n{source}\n```"


def _takes(function: Function) -> str:
    parameters = function.parameters
    if not parameters:
        return "It takes no arguments."
    needed = [p.name for p in parameters if p.default is None and not p.star]
    optional = [p.name for p in parameters if p.default is not None]
    parts = [f"needs {listed(needed[:4])}"] if needed else []
    parts += [f"accepts {listed(optional[:3])} on request"] if optional else []
    return f"It {' and '.join(parts)}." if parts else "It passes on any arguments."


def _outcome(function: Function) -> str:
    errors = raised(function)
    if errors:
        return f"It {third_person('return')} {_result(function)}, or raises `{errors[0]}`."
    return f"It {third_person('return')} {_result(function)}."


def _result(function: Function) -> str:
    if yields(function):
        return "an iterator over the values"
    if not returns_value(function):
        return "nothing"
    return "a truth value" if words_of(function.name)[:1] in (["is"], ["has"], ["can"]) else "the result"
