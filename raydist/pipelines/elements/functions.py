"""Calls of a user's function on the rows of a block."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, final

import numpy as np

from raydist.core.exception_utils import LEAVING, as_exception
from raydist.core.nest import Structure, unflatten
from raydist.pipelines.elements.blocks import Block, Column, private_column
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.elements.tensor_functions import is_module, note_numpy_in_torch, receiving_tensors

_LARGE_BYTES = 1 << 16  # bytes of a row above which rows are copied one by one


def function_label(fn: Callable[..., Any]) -> str:
    """Return where a function is defined, and its name: "train.py:12 augment"."""
    inner = inspect.unwrap(fn.func if isinstance(fn, functools.partial) else fn)
    name = getattr(inner, "__name__", type(inner).__name__)
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {name}" if code else name


def wants_rng(fn: Callable[..., Any]) -> bool:
    """Return True if `fn` has a keyword-only parameter `rng`.

    >>> wants_rng(lambda x, *, rng: x)
    True
    """
    if isinstance(fn, FunctionType) and not vars(fn):  # a plain function without `__wrapped__`: 40 us less
        code = fn.__code__
        return "rng" in code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    inner = inspect.unwrap(fn)
    try:
        parameters = inspect.signature(inner.forward if is_module(inner) else fn).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return False
    return "rng" in parameters and parameters["rng"].kind is inspect.Parameter.KEYWORD_ONLY


def element_rows(structure: Structure, columns: Sequence[Iterable[Any]]) -> Iterable[Any]:
    """Yield the elements of these columns, one by one."""
    return _rows(structure, iter(columns))


def _rows(structure: Structure, columns: Iterator[Iterable[Any]]) -> Iterable[Any]:
    if structure.kind is None:
        return next(columns)
    if not structure.num_leaves:  # such as None: repeated as often as its siblings have rows
        return itertools.repeat(unflatten(structure, ()))
    children = [_rows(child, columns) for child in structure.children]
    strict = all(child.num_leaves for child in structure.children)
    if structure.kind is tuple:
        return zip(*children, strict=strict)
    if structure.shown:
        keys = tuple(structure.keys[place] for place in structure.shown)
        return _named_rows(dict, keys, [children[place] for place in structure.shown], strict)
    return _named_rows(structure.kind, structure.keys, children, strict)


def _named_rows(kind: type, keys: tuple[Any, ...], children: Sequence[Iterable[Any]], strict: bool) -> Iterator[Any]:
    for values in zip(*children, strict=strict):
        fields = dict(zip(keys, values, strict=True))
        yield fields if kind is dict else kind(**fields)


def _arguments(block: Block) -> list[Iterable[Any]]:
    """Return one iterable per positional argument: a tuple is unpacked, everything else is one argument."""
    columns = iter([_own_rows(column) for column in block.columns])
    if block.structure.kind is tuple:
        return [_rows(child, columns) for child in block.structure.children]
    return [_rows(block.structure, columns)]


def _own_rows(column: Column) -> Any:
    """Return the rows of a column; a function may write to them.

    Large rows are copied one by one, just before use: then the copy is in the cache and reuses the memory of the last.
    """
    if column.flags.writeable or column.dtype == object or column.nbytes < _LARGE_BYTES * len(column):
        return private_column(column)
    return map(np.ndarray.copy, column)


def call_rows(
    fn: Callable[..., Any], block: Block, start: int, key: RandomKey | None = None
) -> tuple[list[Any], list[int]]:
    """Call `fn` on every element, in order. Return the results, with an ElementError for each error, and their rows."""
    return RowCalls(fn, block, start, key).take(block.num_rows)


@final
class RowCalls:
    """An iterator form of :func:`call_rows`. Each call happens when its result is taken.

    Attributes:
        make_own: Function to apply to each result before the next call; None for none.
    """

    def __init__(self, fn: Callable[..., Any], block: Block, start: int, key: RandomKey | None = None) -> None:
        arguments = _arguments(block)
        fn = receiving_tensors(fn)
        self._calls = map(fn, *arguments) if key is None else _random_calls(fn, arguments, key, start)
        self._index = start
        self.make_own: Callable[[Any], Any] | None = None

    def take(self, num_rows: int) -> tuple[list[Any], list[int]]:
        """Return the next `num_rows` results, and the positions of errors. At least as many elements must be left."""
        calls = self._calls if self.make_own is None else map(self.make_own, self._calls)
        results: list[Any] = []
        failed: list[int] = []
        while len(results) < num_rows:
            try:
                # On an error, the list keeps the results before it.
                results.extend(itertools.islice(calls, num_rows - len(results)))
                if len(results) < num_rows:  # map() ends early if the function itself raises StopIteration
                    raise RuntimeError("The function raised StopIteration, which would end the iteration.")
            except LEAVING:
                raise
            except BaseException as error:
                note_numpy_in_torch(error)
                failed.append(len(results))
                results.append(ElementError(as_exception(error), self._index + len(results)))
        self._index += num_rows
        return results, failed


def _random_calls(
    fn: Callable[..., Any], arguments: Sequence[Iterable[Any]], key: RandomKey, start: int
) -> Iterator[Any]:
    def call(rng: np.random.Generator, *args: Any) -> Any:
        return fn(*args, rng=rng)

    return map(call, key.generators(start), *arguments)
