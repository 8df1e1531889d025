"""Everything that can be reached from `rd` is described: docstrings, parameters, and examples that run.

What is public is a name of `rd`, `rd.image`, `rd.text` or `rd.feature`, and of each class what it and its bases in
raydist define without an underscore: methods, properties, and attributes (fields, settings, members of an enum, what
methods set). An attribute is described by a line in its class's `Attributes:` or `Args:`, or by a string below it.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from doctest import SKIP, DocTestParser
from types import FunctionType, ModuleType
from typing import Any

import raydist as rd
from raydist.core import errors

LEAST_EXAMPLES = 0.75
SECTION = re.compile(r"^( *)(\w+):$")
ENTRY = re.compile(r"^( *)(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \([^)]*\))?:( |$)")


@dataclass(frozen=True)
class Described:
    """One public name and what its documentation says.

    Attributes:
        name: Where it is defined: "raydist.dataset.batching.Batching.batch".
        doc: Its docstring, or else that of the member that it overrides.
        parameters: What it takes, `self` aside.
        explained: The names that are described for it.
        known: The names that may be.
        needs_example: It can be called, and overrides nothing that is described.
    """

    name: str
    doc: str
    parameters: tuple[str, ...] = ()
    explained: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    needs_example: bool = False

    @property
    def has_example(self) -> bool:
        return any(SKIP not in example.options for example in DocTestParser().get_examples(self.doc))


def entries(doc: str, *sections: str) -> frozenset[str]:
    """The names with a line of their own in these sections of a docstring in Google style."""
    found: set[str] = set()
    inside, indent = False, 0
    for line in inspect.cleandoc(doc).splitlines():
        if heading := SECTION.match(line):
            if not inside or len(heading[1]) <= indent:
                inside, indent = heading[2] in sections, len(heading[1])
        elif line.strip() and len(line) - len(line.lstrip()) <= indent:
            inside = False
        elif inside and (entry := ENTRY.match(line)) and len(entry[1]) == indent + 4:
            found.update(name.strip(" *") for name in entry[2].split(","))
    return frozenset(found)


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    names = tuple(inspect.signature(function).parameters)
    return tuple(name for name in names if name not in ("self", "cls") and not name.startswith("_"))


def of_function(function: FunctionType, name: str) -> Described:
    parameters, doc = parameters_of(function), function.__doc__ or ""
    return Described(name, doc, parameters, entries(doc, "Args"), frozenset(parameters), needs_example=True)


def bases_here(cls: type) -> list[type]:
    """The class and its bases that are raydist's, or of whoever defines the class."""
    package = cls.__module__.partition(".")[0]
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] == package]


def full_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def of_class(cls: type) -> Iterator[Described]:
    """The class, its members, and what it inherits within its package."""
    yield of_class_itself(cls)
    for base in bases_here(cls):
        yield from of_members(base)
        yield from of_attributes(base)


def of_class_itself(cls: type) -> Described:
    family = bases_here(cls)
    parameters = parameters_of(constructor(cls))
    docs = [doc for base in family for doc in (own_doc(base), getattr(base.__dict__.get("__init__"), "__doc__", None))]
    explained = frozenset[str]().union(*(entries(doc, "Args", "Attributes") for doc in docs if doc))
    known = {name for base in family for name in (*vars(base), *attributes(base))} | set(parameters)
    takes = parameters if is_made_here(cls) else ()
    return Described(full_name(cls), own_doc(cls), takes, explained, frozenset(known), not issubclass(cls, enum.Enum))


def constructor(cls: type) -> Any:
    return next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))


def is_made_here(cls: type) -> bool:
    """Return True if its constructor is of the same package; others need no description."""
    here = {base.__module__ for base in bases_here(cls)}
    return not issubclass(cls, enum.Enum) and getattr(constructor(cls), "__module__", None) in here


def own_doc(cls: type) -> str:
    """Its docstring; not the signature that `dataclass` writes in its place."""
    doc = cls.__dict__.get("__doc__") or ""
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def of_attributes(cls: type) -> Iterator[Described]:
    lines = entries(own_doc(cls), "Args", "Attributes")
    for name, text in attributes(cls).items():
        if not overrides(cls, name):
            yield Described(f"{full_name(cls)}.{name}", text or (f"{name}: in the class" if name in lines else ""))


def of_members(cls: type) -> Iterator[Described]:
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(function, FunctionType):
            yield of_method(cls, name, function)
        elif isinstance(member, property | functools.cached_property):
            yield Described(f"{full_name(cls)}.{name}", member.__doc__ or overridden_doc(cls, name))
        elif isinstance(member, type) and member.__qualname__.startswith(f"{cls.__qualname__}."):
            yield from of_class(member)


def of_method(cls: type, name: str, method: FunctionType) -> Described:
    """Describe a method; the docstring of the method that it overrides counts as well."""
    above, own = overridden_doc(cls, name), of_function(method, f"{full_name(cls)}.{name}")
    before = entries(above, "Args")
    return replace(
        own,
        doc=own.doc or above,
        explained=own.explained | before,
        known=own.known | before,
        needs_example=not above,
    )


def overridden_doc(cls: type, name: str) -> str:
    """The docstring of the member that this one overrides, if that is of the same package: help() shows it."""
    docs = (getattr(base.__dict__.get(name), "__doc__", None) for base in bases_here(cls)[1:])
    return next((doc for doc in docs if doc), "")


def overrides(cls: type, attribute: str) -> bool:
    declared = any(attribute in (*vars(base), *vars(base).get("__annotations__", ())) for base in cls.__mro__[1:])
    return declared or any(attribute in attributes(base) for base in bases_here(cls)[1:])


@functools.cache
def attributes(cls: type) -> dict[str, str]:
    """Public attributes of the class body, and those that methods set on `self`, each with the string below it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    members = assigned(tree.body, "")
    for method in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for block in blocks_of(method):
            members = assigned(block, "self.") | members
    return {name: text for name, text in members.items() if not is_code(vars(cls).get(name))}


def blocks_of(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Its body, and those of the statements in it."""
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list) and block:
                yield block


def is_code(member: object) -> bool:
    return isinstance(member, FunctionType | classmethod | staticmethod | property | type)


def assigned(body: list[ast.stmt], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        for target in map(ast.unparse, targets_of(node)):
            name = target.removeprefix(prefix)
            if target.startswith(prefix) and name.isidentifier() and not name.startswith("_"):
                found.setdefault(name, string_of(after))
    return found


def targets_of(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]


def string_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def of_package(package: ModuleType) -> Iterator[Described]:
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, ModuleType):
            yield Described(value.__name__, value.__doc__ or "")
            yield from of_package(value)
        elif isinstance(value, type):
            yield from of_class(value)
        elif isinstance(value, FunctionType):
            yield of_function(value, full_name(value))
        elif not name.startswith("_"):
            home = home_of(package, name)
            body = ast.parse(inspect.getsource(importlib.import_module(home))).body
            yield Described(f"{home}.{name}", assigned(body, "")[name])


def home_of(package: ModuleType, name: str) -> str:
    """The module that a package imports a name from."""
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(package))) if isinstance(node, ast.ImportFrom)]
    return next(node.module or "" for node in imports if name in [alias.asname or alias.name for alias in node.names])


@functools.cache
def public() -> tuple[Described, ...]:
    return tuple({one.name: one for one in of_package(rd)}.values())


def unexplained(one: Described) -> list[str]:
    """Parameters without a description."""
    return [name for name in one.parameters if one.doc and name not in one.explained]


def unknown_errors(one: Described) -> list[str]:
    """Return names under `Raises:` that are no errors of Python, raydist, or (with a dot) another library."""
    named = sorted(entries(one.doc, "Raises"))
    return [name for name in named if not ("." in name or name in errors.__all__ or hasattr(builtins, name))]


def report(title: str, problems: Callable[[Described], list[str]]) -> str:
    """Problems of all public names, below a title; empty if there are none."""
    found = {one.name: problems(one) for one in public()}
    lines = [f"{name}: {', '.join(words)}" for name, words in found.items() if words]
    return "\n".join([f"{len(lines)} {title}", *lines]) if lines else ""


def test_public_names_are_described_as_they_are() -> None:
    problems: list[tuple[str, Callable[[Described], list[str]]]] = [
        ("are not described", lambda one: [] if one.doc.strip() else ["no docstring"]),
        ("need a line in `Args:` for each of these parameters", unexplained),
        ("explain what they do not have", lambda one: sorted(one.explained - one.known)),
        ("say that they raise errors that there are not", unknown_errors),
    ]
    for title, of_one in problems:
        assert report(f"public names {title}:", of_one) == ""


def test_most_have_an_example_that_runs() -> None:
    callables = [one for one in public() if one.needs_example]
    missing = [one.name for one in callables if not one.has_example]
    share = 1 - len(missing) / len(callables)
    assert share >= LEAST_EXAMPLES, "\n".join([f"{len(missing)} callables are without an example:", *missing])


def test_entries_are_those_of_the_section() -> None:
    for doc, expected in [
        ("Do it.", set()),
        ("Do it.\n\n    Args:\n        a: One.\n        b (int): Two.\n            c: no entry\n", {"a", "b"}),
        ("Do it.\n\n    Args:\n        a: One.\n\n    Note: c\n\n    Raises:\n        d: no\n", {"a"}),
        ("Do it.\n\n    Args:\n        *a: One.\n        **b: Two.\n    c: no\n", {"a", "b"}),
    ]:
        assert entries(doc, "Args") == expected, doc


def test_names_of_the_packages_inside_are_public() -> None:
    names = {one.name for one in public()}
    assert names >= {"raydist.image.decode.MAX_PIXELS", "raydist.text.step.Split", "raydist.core.values.AUTOTUNE"}
    assert names >= {"raydist.dataset.batching.Batching.batch", "raydist.options.pipeline.Options.seed"}
