"""Errors teach: almost every message of each folder shows a value, or says what to do.

A message shows a value if anything is put into it: a replacement in an f-string, `%`, a call that makes the text. It
says what to do if it has the word "must" (or "needs ..., got ..."), or if a sentence or clause begins with a verb of
`VERBS` in the imperative. Counted is every `raise` that makes an error; not signals that carry no message
(`StopIteration`, a bare `KeyError(key)`, exceptions whose names begin with an underscore).
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.import_graph import modules

LEAST_SHARE = 0.85
VERBS = (
    "add|ask|batch|build|call|check|choose|close|convert|create|declare|decode|delete|drop|give|install|iterate|keep|"
    "leave|make|map|move|name|open|pass|put|raise|read|remove|rename|replace|return|run|save|say|set|split|start|take|"
    "try|use|wait|wrap|write"
)
INSTRUCTION = re.compile(rf"(?:^|[.:;!?,] )(?:or |and |then )?(?:{VERBS}) (?!of\b)[^ ]", re.IGNORECASE)
OBLIGATION = re.compile(r"\bmust\b|\bneeds?\b.*, got\b")
SIGNALS = ("StopIteration", "StopAsyncIteration", "NotImplementedError", "GeneratorExit")
LOOK_UPS = ("AttributeError", "IndexError", "KeyError")


def is_good(message: ast.expr) -> bool:
    match message:
        case ast.Constant(value=str(text)):
            return bool(OBLIGATION.search(text) or INSTRUCTION.search(text))
        case ast.JoinedStr(values=parts):
            return any(isinstance(part, ast.FormattedValue) for part in parts)
        case ast.BinOp(op=operator, left=left, right=right):
            return isinstance(operator, ast.Mod) or is_good(left) or is_good(right)
        case ast.IfExp(body=body, orelse=other):
            return is_good(body) and is_good(other)
    return not isinstance(message, ast.Constant)


def error_classes(error: ast.expr) -> Iterator[tuple[str, list[ast.expr]]]:
    """Each class that is raised, with its arguments; nothing for a variable or a function that makes the error."""
    if isinstance(error, ast.IfExp):
        yield from (*error_classes(error.body), *error_classes(error.orelse))
        return
    made = error.func if isinstance(error, ast.Call) else error
    name = made.id if isinstance(made, ast.Name) else made.attr if isinstance(made, ast.Attribute) else ""
    if re.fullmatch(r"[A-Z]\w*", name) and name not in SIGNALS:
        arguments = [*error.args, *(keyword.value for keyword in error.keywords)] if isinstance(error, ast.Call) else []
        text = any(isinstance(node, ast.Constant | ast.JoinedStr) for each in arguments for node in ast.walk(each))
        if text or name not in LOOK_UPS:
            yield name, arguments


def judged(source: str) -> list[tuple[str, bool]]:
    """The source of each `raise` that makes an error, and whether its message is a good one."""
    raised = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise) and node.exc]
    return [
        (ast.unparse(node), any(map(is_good, arguments)))
        for node in raised
        for _, arguments in error_classes(node.exc)  # type: ignore[arg-type]  # it is there
    ]


def test_messages_show_a_value_or_say_what_to_do() -> None:
    folders: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for path in modules().values():
        folders[str(path.parent)] += judged(path.read_text())
    assert sum(map(len, folders.values())) > 400
    for folder, found in folders.items():
        bad = [text for text, good in found if not good]
        assert len(bad) <= (1 - LEAST_SHARE) * len(found), f"messages in {folder} do neither:\n" + "\n".join(bad)


def test_the_check_refuses() -> None:
    for source in [
        "raise ValueError",
        "raise ValueError()",
        'raise ValueError("Something went wrong.")',
        'raise ValueError("The user is closed")',
        'raise ValueError("The server needs no name.")',
        'raise ValueError("Set of numbers is empty, map of names too.")',
        'raise ValueError("Its use is not allowed, and the call fails.")',
        'raise ValueError(f"No value here.")',
        'raise ValueError("a" + "b")',
        'raise KeyError("unknown name")',
        'raise ValueError("closed") if a else KeyError("no")',
    ]:
        assert judged(source), source
        assert not any(good for _, good in judged(source)), source
    assert judged("raise KeyError(key)") == judged("raise error") == judged("raise _Signal('x')") == []
