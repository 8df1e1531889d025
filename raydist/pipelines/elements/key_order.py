"""One order of dict keys for all elements of a dataset: the order in the first element."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any, final

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import Structure
from raydist.pipelines.elements.blocks import Block

_MAX_TEXT = 2000  # characters of an order in the state of an iterator, which must stay small; tables may be wide


@final
class KeyOrder:
    """A filter that gives blocks of equal structure the order of keys of the first block.

    >>> from raydist.pipelines.elements.rows import block_of_rows
    >>> order = KeyOrder()
    >>> [list(order.of(block_of_rows([row])).row(0)) for row in ({"b": 1, "a": 2}, {"a": 3, "b": 4})]
    [['b', 'a'], ['b', 'a']]
    """

    def __init__(self) -> None:
        self._first: Structure | None = None
        self._saved_schema: Any = None  # of a restored order, until the first block arrives
        self._known: Any = None

    def of(self, block: Block) -> Block:
        """Return `block` with the keys of its dicts in the order of the first block."""
        if self._first is None:
            self._first = self._restored(block.structure)
            self._known = _short(_schema(self._first))
            if self._first.is_sorted and _has_keys(self._first):
                self._known = True
        if block.structure is self._first or block.structure != self._first:
            return block
        return Block(self._first, block.specs, block.columns, block.num_rows)

    def _restored(self, structure: Structure) -> Structure:
        if self._saved_schema is None:
            return structure
        return structure.by_key() if self._saved_schema is True else _in_order(structure, self._saved_schema)

    def schema(self) -> Any:
        """Return the order as JSON: True if sorted; None without keys, before the first element, or if too long."""
        return self._known

    def restore(self, schema: Any) -> None:
        """Continue with a `schema`; None starts over."""
        self._first, self._saved_schema, self._known = None, schema, schema


def _has_keys(structure: Structure) -> bool:
    is_dict = structure.kind is dict and len(structure.children) > 1
    return is_dict or any(map(_has_keys, structure.children))


def _schema(structure: Structure) -> Any:
    if structure.is_sorted:
        return None
    return [list(structure.shown), [_schema(child) for child in structure.children]]


def _short(schema: Any) -> Any:
    return schema if len(json.dumps(schema)) <= _MAX_TEXT else None


def _in_order(structure: Structure, schema: Any) -> Structure:
    if schema is None:
        return structure.by_key()
    try:
        shown, inner = schema
        children = tuple(itertools.starmap(_in_order, zip(structure.children, inner, strict=True)))
        fits = not shown or (structure.kind is dict and sorted(shown) == list(range(len(children))))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise InvalidArgumentError(
            f"The state's order of keys must be one of {structure}, got {schema!r:.200}. Load the state as it was "
            "saved."
        )
    return replace(structure, children=children, shown=tuple(shown))
