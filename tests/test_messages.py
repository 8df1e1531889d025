"""Errors teach: almost every message of each package shows a value, or says what to do.

A message shows a value if something is put into it: a replacement in an f-string, `%`, `.format`, a call that makes the
text, or a name that one of these was given to. It says what to do if it has the word "must" (or "needs ..., got ..."),
or if a sentence or clause begins with a verb of `VERBS` in the imperative.

Counted is every `raise` that makes an error: not those that pass one on (`raise`, `raise error`), nor signals that are
no messages (`StopIteration`, a bare `KeyError(key)`, exceptions whose names begin with an underscore, stubs). Where a
function makes the error (`raise mismatch(...)`), its own text counts.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "raydist"
LEAST_SHARE = 0.9

VERBS = (
    "add|ask|batch|build|call|check|choose|close|convert|create|declare|decode|delete|drop|give|install|iterate|keep|"
    "leave|make|map|move|name|open|pass|put|raise|read|remove|rename|replace|return|run|save|say|set|split|start|take|"
    "try|use|wait|wrap|write"
)
INSTRUCTION = re.compile(rf"(?:^|[.:;!?,] )(?:or |and |then )?(?:{VERBS}) (?!of\b)[^ ]", re.IGNORECASE)
OBLIGATION = re.compile(r"\bmust\b|\bneeds?\b.*, got\b")
SIGNALS = ("StopIteration", "StopAsyncIteration", "NotImplementedError", "GeneratorExit")
LOOK_UPS = ("AttributeError", "IndexError", "KeyError")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def says_what_to_do(text: str) -> bool:
    return bool(OBLIGATION.search(text) or INSTRUCTION.search(text))


@dataclass(frozen=True)
class Sources:
    """Parsed modules, and what is defined in them by name.

    Attributes:
        trees: A syntax tree for each module's path.
        functions: Functions and methods by name, with the paths of their modules.
        constants: What is assigned in the bodies of modules, by name.
    """

    trees: Mapping[str, ast.Module]
    functions: Mapping[str, Sequence[tuple[str, Function]]]
    constants: Mapping[str, Sequence[ast.expr]]

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Sources:
        trees = {path: ast.parse(text) for path, text in texts.items()}
        functions: dict[str, list[tuple[str, Function]]] = defaultdict(list)
        constants: dict[str, list[ast.expr]] = defaultdict(list)
        for path, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    functions[node.name].append((path, node))
            for name, value in assignments(tree.body):
                constants[name].append(value)
        return cls(trees, dict(functions), dict(constants))

    def functions_called(self, name: str, path: str) -> list[tuple[str, Function]]:
        """Those of the module itself, or else of all modules."""
        found = self.functions.get(name, ())
        return [one for one in found if one[0] == path] or list(found)


def assignments(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def name_of(node: ast.expr) -> str:
    """`f` of `f`, `self.f` and `module.f`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_error_class(node: ast.expr) -> bool:
    name = name_of(node)
    known = getattr(builtins, name, None)
    return (isinstance(known, type) and issubclass(known, BaseException)) or bool(re.fullmatch(r"_?[A-Z]\w*", name))


@dataclass(frozen=True)
class Judge:
    """Says of an error that is raised in a function of a module whether its message is a good one."""

    sources: Sources
    path: str
    function: Function | None = None
    asked: frozenset[str] = frozenset()

    def raised(self, error: ast.expr) -> bool | None:
        """Whether the message is good; None for what makes no error, or a signal."""
        if isinstance(error, ast.Name) and not is_error_class(error):
            made = [value for value in self.values_of(error.id) if isinstance(value, ast.Call)]
            return self.all_good([self.raised(value) for value in made])
        if isinstance(error, ast.IfExp | ast.BoolOp):
            parts = error.values if isinstance(error, ast.BoolOp) else [error.body, error.orelse]
            return self.all_good([self.raised(part) for part in parts])
        if isinstance(error, ast.Call) and not is_error_class(error.func) and name_of(error.func):
            return self.made_by(error)
        return None if is_signal(error) else isinstance(error, ast.Call) and self.shows(error)

    def made_by(self, call: ast.Call) -> bool | None:
        """Of the errors that the called function makes; of a variable that holds a class: of its arguments."""
        name = name_of(call.func)
        if name in self.asked or hasattr(builtins, name):
            return None
        if name not in self.sources.functions:
            return self.shows(call) if isinstance(call.func, ast.Name) else None
        return self.all_good(
            [judge.raised(made) for judge, function in self.inside(name) for made in errors_of(function)]
        )

    def inside(self, name: str) -> list[tuple[Judge, Function]]:
        found = self.sources.functions_called(name, self.path)
        return [(Judge(self.sources, path, function, self.asked | {name}), function) for path, function in found]

    @staticmethod
    def all_good(verdicts: Sequence[bool | None]) -> bool | None:
        counted = [verdict for verdict in verdicts if verdict is not None]
        return all(counted) if counted else None

    def shows(self, error: ast.Call) -> bool:
        arguments = [*error.args, *(keyword.value for keyword in error.keywords)]
        return any(self.is_good(argument) for argument in arguments)

    def is_good(self, message: ast.expr) -> bool:
        match message:
            case ast.Constant(value=str(text)):
                return says_what_to_do(text)
            case ast.JoinedStr(values=parts):
                return any(isinstance(part, ast.FormattedValue) for part in parts)
            case ast.BinOp(op=operator, left=left, right=right):
                return isinstance(operator, ast.Mod) or self.is_good(left) or self.is_good(right)
            case ast.IfExp(body=body, orelse=other):
                return self.is_good(body) and self.is_good(other)
            case ast.Name(id=name):
                return self.name_is_good(name)
            case ast.Call():
                return self.text_is_good(message)
        return isinstance(message, ast.Attribute) and message.attr == "message"  # of the error in whose place it stands

    def name_is_good(self, name: str) -> bool:
        if name in self.asked:
            return False
        values = self.values_of(name) or list(self.sources.constants.get(name, ()))
        judge = replace(self, asked=self.asked | {name})
        return bool(values) and all(judge.is_good(value) for value in values)

    def text_is_good(self, call: ast.Call) -> bool:
        """Of a call that gives the text: by what a function of ours returns, else by whether it is given anything."""
        name = name_of(call.func)
        if name in self.asked or name not in self.sources.functions:
            return bool(call.args or call.keywords)
        returned = [(judge, value) for judge, function in self.inside(name) for value in values_returned(function)]
        return bool(returned) and all(judge.is_good(value) for judge, value in returned)

    def values_of(self, name: str) -> list[ast.expr]:
        """What a name is given anywhere in the function."""
        if self.function is None:
            return []
        nodes = [node for node in ast.walk(self.function) if isinstance(node, ast.stmt)]
        return [value for found, value in assignments(nodes) if found == name]


def errors_of(function: Function) -> list[ast.expr]:
    """The errors that a function makes, and those that it returns from another one."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    made = [call for call in calls if is_error_class(call.func) and name_of(call.func).endswith("Error")]
    return [*made, *(value for value in values_returned(function) if isinstance(value, ast.Call) and value not in made)]


def values_returned(function: Function) -> list[ast.expr]:
    return [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]


def is_signal(error: ast.expr) -> bool:
    """An exception that only says that something is so, to code that catches it; or none that is made here."""
    call = error if isinstance(error, ast.Call) else None
    name = name_of(call.func if call else error)
    if isinstance(error, ast.Attribute | ast.Subscript | ast.Name) and not is_error_class(error):
        return True
    look_up = name in LOOK_UPS and not any(isinstance(node, ast.Constant | ast.JoinedStr) for node in ast.walk(error))
    return name in SIGNALS or name.startswith("_") or isinstance(error, ast.Subscript) or look_up


@dataclass(frozen=True)
class Raise:
    """One `raise` that makes an error.

    Attributes:
        place: "raydist/core/values.py:12".
        text: Its source.
        is_good: Whether its message shows a value or says what to do.
    """

    place: str
    text: str
    is_good: bool


def raises(sources: Sources, path: str) -> Iterator[Raise]:
    yield from _raises(sources, path, sources.trees[path], None)


def _raises(sources: Sources, path: str, tree: ast.AST, function: Function | None) -> Iterator[Raise]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise) and node.exc:
            verdict = Judge(sources, path, function).raised(node.exc)
            if verdict is not None:
                yield Raise(f"{path}:{node.lineno}", ast.unparse(node), verdict)
        yield from _raises(sources, path, node, node if isinstance(node, Function) else function)


def all_sources() -> Sources:
    return Sources.of({path.relative_to(ROOT).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")})


@functools.cache
def by_folder() -> dict[str, list[Raise]]:
    sources = all_sources()
    found: dict[str, list[Raise]] = defaultdict(list)
    for path in sorted(sources.trees):
        found[path.rpartition("/")[0]] += raises(sources, path)
    return dict(found)


@pytest.mark.timeout(300)  # it reads the whole package
def test_messages_show_a_value_or_say_what_to_do() -> None:
    for folder, found in by_folder().items():
        bad = [one for one in found if not one.is_good]
        listed = "\n".join(f"{one.place}: {one.text}" for one in bad)
        enough = len(found) - len(bad) >= LEAST_SHARE * len(found)
        assert enough, f"{len(bad)} of {len(found)} messages in {folder} do neither:\n{listed}"


def judged(source: str, *more: str) -> list[bool]:
    texts = {"it.py": source} | {f"{number}.py": text for number, text in enumerate(more)}
    return [one.is_good for one in raises(Sources.of(texts), "it.py")]


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
        "def f(text):\n    raise ValueError(text)",
        'def f(size):\n    text = f"too large: {size}"\n    text = "too large"\n    raise ValueError(text)',
        'def f():\n    error = ValueError("too large")\n    raise error',
        'raise too_large()\ndef too_large():\n    return ValueError("too large")',
        'raise too_large(3)\ndef too_large(n):\n    return ValueError("too large") if n else ValueError(f"{n}")',
        'raise KeyError("unknown name")',
        'HINT = "It is closed."\nraise ValueError(HINT)',
        'raise ValueError(f"{a}") if a else KeyError("no")',
    ]:
        assert judged(source) == [False], source


def test_functions_of_other_modules_count_by_their_text() -> None:
    assert judged("raise lost(3)", 'def lost(n):\n    return OSError(f"{n} bytes are lost")') == [True]
    assert judged("raise lost(3)", 'def lost(n):\n    return OSError("lost")') == [False]


@pytest.mark.timeout(300)
def test_every_package_with_errors_is_checked() -> None:
    assert {"raydist", "raydist/dataset", "raydist/pipelines/ops", "raydist/actors"} <= set(by_folder())
    assert sum(map(len, by_folder().values())) > 400
