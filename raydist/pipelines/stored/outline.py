"""The structure of saved elements as JSON.

A file names the classes of its namedtuples and dataclasses, but nothing is imported. A class that the program has
imported, with the same fields, is used; otherwise a plain class of the same name and fields is made.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from typing import Any

from raydist.errors import InvalidArgumentError
from raydist.nest import LEAF, NOTHING, Structure

__all__ = ["outline_of", "structure_of"]


def outline_of(structure: Structure) -> Any:
    """Return a structure as JSON.

    >>> outline_of(Structure(tuple, (0, 1), (LEAF, LEAF)))
    {'tuple': [None, None]}

    Raises:
        InvalidArgumentError: JSON cannot represent a part of the structure.
    """
    kind = structure.kind
    if kind is None:
        return None
    if structure == NOTHING:
        return {"none": []}
    children = [outline_of(child) for child in structure.children]
    if kind is tuple:
        return {"tuple": children}
    if not all(isinstance(key, str) for key in structure.keys):
        raise InvalidArgumentError(
            f"Elements of tuples, namedtuples, dataclasses and of dicts with text keys can be saved, got {structure}. "
            "Map them to a dict with text keys first."
        )
    named = dict(zip(structure.keys, children, strict=True))
    if kind is dict:
        return {"dict": named, **({"shown": list(structure.shown)} if structure.shown else {})}
    form = "namedtuple" if issubclass(kind, tuple) else "dataclass"
    return {form: named, "class": [kind.__module__, kind.__qualname__]}


def structure_of(outline: Any) -> Structure:
    """Return the structure from which :func:`outline_of` made `outline`.

    Raises:
        ValueError: `outline` is invalid. (Or AttributeError, KeyError, TypeError.)
    """
    if outline is None:
        return LEAF
    if outline == {"none": []}:
        return NOTHING
    form = next(form for form in ("tuple", "dict", "namedtuple", "dataclass", None) if form is None or form in outline)
    if form is None:
        raise ValueError(f"it has an unknown structure {outline!r:.100}")
    children = outline[form]
    if form == "tuple":
        return Structure(tuple, tuple(range(len(children))), tuple(map(structure_of, children)))
    inner = tuple(map(structure_of, children.values()))
    if form == "dict":
        return Structure(dict, tuple(children), inner, _permutation(outline.get("shown", []), len(inner)))
    module, name = outline["class"]
    return Structure(_class_of(form, str(module), str(name), tuple(children)), tuple(children), inner)


def _permutation(shown: Any, count: int) -> tuple[int, ...]:
    if shown and sorted(shown) != list(range(count)):
        raise ValueError(f"it shows the {count} keys of a dict in the order {shown!r:.100}")
    return tuple(shown)


def _class_of(form: str, module: str, name: str, fields: tuple[str, ...]) -> type:
    # Through the namespaces themselves: an attribute lookup may run code and import modules.
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, type) and _fields(found) == (form, fields):
        return found
    return _made_class(form, name.rpartition(".")[2], fields)


def _fields(kind: type) -> tuple[str, tuple[str, ...]] | None:
    if issubclass(kind, tuple):
        return "namedtuple", tuple(getattr(kind, "_fields", ()))
    return ("dataclass", tuple(kind.__dataclass_fields__)) if dataclasses.is_dataclass(kind) else None


@functools.lru_cache(maxsize=256)  # so that two datasets from one directory share a class
def _made_class(form: str, name: str, fields: tuple[str, ...]) -> type:
    if form == "namedtuple":
        return collections.namedtuple(name, fields)
    return dataclasses.make_dataclass(name, fields)
