"""Dataset.group_by_window: datasets that a function makes from windows of elements with one key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.exception_utils import LEAVING, annotate, as_exception
from raydist.core.nest import LEAF, Structure, unflatten
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.elements.blocks import Block, concat_blocks, copied, object_column
from raydist.pipelines.elements.functions import call_rows, function_label
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UncountedOp
from raydist.pipelines.engine.producers import BorderIterator, Producer, ReplayIterator, read_watched
from raydist.pipelines.engine.request_size import RequestSize
from raydist.pipelines.ops.cycle import WHOLE, Cycle
from raydist.pipelines.ops.nested import DatasetOpener, probe_nested
from raydist.pipelines.ops.selection import TakeOp
from raydist.pipelines.sources.memory import MemoryOp

_INT64 = np.dtype(np.int64)
_PAIR = (LEAF, LEAF)
_MOST_KEPT_BLOCKS = 64  # in which elements wait for their group


@final
@dataclass(frozen=True, eq=False)
class KeyedWindowsOp(UncountedOp):
    """Pairs (key, dataset of elements with that key): each window when full; at the end the rest, by key.

    `make_dataset` makes the user's dataset from the operation of a window.
    """

    key_func: Callable[..., Any]
    window_size: int | None
    window_size_func: Callable[[Any], Any] | None
    make_dataset: Callable[[DatasetOp], Any]

    def __post_init__(self) -> None:
        if not callable(self.key_func):
            raise InvalidArgumentError(f"key_func must be a function, got {self.key_func!r:.100}.")
        if (self.window_size is None) == (self.window_size_func is None):
            raise InvalidArgumentError(
                "Either window_size or window_size_func must be given, got "
                f"window_size={self.window_size!r} and window_size_func={self.window_size_func!r:.100}."
            )
        if self.window_size is not None and self.window_size < 1:
            raise InvalidArgumentError(f"window_size must be >= 1, got {self.window_size}.")
        if self.window_size_func is not None and not callable(self.window_size_func):
            raise InvalidArgumentError(f"window_size_func must be a function, got {self.window_size_func!r:.100}.")

    @property
    def label(self) -> str:
        size = self.window_size if self.window_size_func is None else function_label(self.window_size_func)
        return f"keyed_windows({function_label(self.key_func)}, {size})"

    def element_spec(self) -> Any:
        return TensorSpec((), _INT64), DatasetSpec(self.input.element_spec())

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ReplayIterator(_KeyedWindows(self, ctx.build(self.input), ctx.operation_names[id(self)]))


@final
@dataclass(slots=True)
class _Group:
    """The elements of a group that is not complete.

    Attributes:
        missing: Number of elements until it is complete.
        blocks: Elements of earlier input blocks, with the numbers of these blocks.
        rows: Rows of the current input block that belong to the group.
    """

    missing: int
    blocks: list[tuple[int, Block]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


@final
class KeyedGroups:
    """Elements in groups by key. A group is complete when it has as many elements as `size_of` its key says.

    Few elements may wait in blocks of the object store: each rare key would keep such a block for each element.
    """

    def __init__(self, size_of: Callable[[int], int]) -> None:
        self._size_of = size_of
        self._groups: dict[int, _Group] = {}
        self._num_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, key: int, row: int, block: Block) -> list[Block] | None:
        """Add a row of the current input block. Return the blocks of its group if it is complete."""
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(self._size_of(key))
        group.rows.append(row)
        group.missing -= 1
        if group.missing:
            return None
        self._settle(group, block)
        return [rows for _, rows in self._groups.pop(key).blocks]

    def end_block(self, block: Block) -> None:
        """Take the rows of all groups out of the current input block."""
        for group in self._groups.values():
            self._settle(group, block)
        self._num_blocks += 1

    def _settle(self, group: _Group, block: Block) -> None:
        if group.rows:
            group.blocks.append((self._num_blocks, block.take(np.array(group.rows, np.int64))))
            group.rows = []
        oldest = self._num_blocks - _MOST_KEPT_BLOCKS
        for place, (number, held) in enumerate(group.blocks):
            if number >= oldest:
                break
            if held.is_remote:
                group.blocks[place] = number, copied(held.in_memory())

    def pop_first(self) -> tuple[int, list[Block]]:
        """Return the smallest key and the blocks of its group, and forget the group."""
        key = min(self._groups)
        return key, [rows for _, rows in self._groups.pop(key).blocks]

    def clear(self) -> None:
        self._groups.clear()


@final
class _KeyedWindows(Producer):
    """A producer that holds the elements of all windows that are not full."""

    def __init__(self, op: KeyedWindowsOp, source: OpIterator, name: str) -> None:
        self._op = op
        self._source = source
        self._name = name
        self._windows = KeyedGroups(self._size)
        self._index = 0  # index of the next element
        self._request = RequestSize()
        self._ended = False

    def make(self, limit: int) -> Sequence[Item]:
        if not self._ended:
            try:
                return self._group(read_watched(self._source, self._request))
            except StopIteration:
                self._ended = True
        if not self._windows:
            raise StopIteration
        return [self._pair(*self._windows.pop_first())]

    def _group(self, item: Item) -> list[Item]:
        if isinstance(item, ElementError):
            self._index += 1
            return [item]
        items: list[Item] = []
        for row, key in enumerate(self._keys(item)):
            done = key if isinstance(key, ElementError) else self._add(int(key), row, item)
            if done is not None:
                items.append(done)
        self._windows.end_block(item)
        self._index += item.num_rows
        return items

    def _keys(self, block: Block) -> list[Any]:
        """Return the key of every element, or the error in its place."""
        keys, failed = call_rows(self._op.key_func, block.shared(), self._index)
        if failed or not set(map(type, keys)) <= {int, np.int64}:
            keys = [self._checked(key, self._index + row) for row, key in enumerate(keys)]
        return keys

    def _checked(self, key: Any, index: int) -> Any:
        if not isinstance(key, ElementError):
            try:
                return _int64(key, "A key")
            except SpecError as error:
                key = ElementError(error, index)
        annotate(key.error, f"In {self._name} ({function_label(self._op.key_func)}), element {index} of its input.")
        return key

    def _add(self, key: int, row: int, block: Block) -> Item | None:
        """Add an element to its window. Return the window if it is full, or an error in place of the element."""
        try:
            blocks = self._windows.add(key, row, block)
        except LEAVING:
            raise
        except BaseException as error:  # of the user's function for the size of a window
            annotate(error, f"In {self._name}, for the window of key {key}.")
            return ElementError(as_exception(error), self._index + row)
        return None if blocks is None else self._pair(key, blocks)

    def _size(self, key: int) -> int:
        if self._op.window_size_func is None:
            return self._op.window_size or 0
        size = _int64(self._op.window_size_func(np.int64(key)), "A window size")
        if size < 1:
            raise InvalidArgumentError(f"A window size must be >= 1, got {size}.")
        return size

    def _pair(self, key: int, blocks: list[Block]) -> Item:
        try:
            rows = concat_blocks(blocks)
        except SpecError as error:
            return ElementError(error)
        spec = DatasetSpec(unflatten(rows.structure, rows.specs))
        dataset = object_column([self._op.make_dataset(MemoryOp(rows, "window"))])
        columns = (np.array([key], _INT64), dataset)
        return Block(Structure(tuple, (0, 1), _PAIR), (TensorSpec((), _INT64), spec), columns, 1)

    def close(self) -> None:
        self._windows.clear()
        self._source.close()


def _int64(value: Any, what: str) -> int:
    leaf = as_leaf(value)
    if getattr(leaf, "dtype", None) != _INT64 or np.ndim(leaf):
        raise SpecError(f"{what} must be one int64, got {value!r:.100}. Use int(...) or np.int64(...).")
    return int(leaf)


@final
@dataclass(frozen=True, eq=False)
class GroupByWindowOp(DatasetOp):
    """The elements of the datasets `reduce_func(key, window)`, one window after the other.

    The state of an iterator is the number of windows before the open one, and the state of the open window's dataset.
    """

    windows: KeyedWindowsOp
    reduce_func: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.reduce_func):
            raise InvalidArgumentError(f"reduce_func must be a function, got {self.reduce_func!r:.100}.")

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.windows,)

    @property
    def label(self) -> str:
        return f"group_by_window({function_label(self.reduce_func)})"

    @property
    def has_declared_shapes(self) -> bool:
        return False

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return probe_nested(self.windows.input, self._reduce_first, self.label)

    def _reduce_first(self, *element: Any) -> Any:
        """Reduce a window of the first element alone: waiting for a full window might mean reading everything."""
        windows = self.windows
        key = np.int64(windows.key_func(*element))
        return self.reduce_func(key, windows.make_dataset(TakeOp(windows.input, 1)))

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        opener = DatasetOpener(ctx.build(self.windows), self.reduce_func, ctx, ctx.operation_names[id(self)])
        return BorderIterator(Cycle(opener, length=1, block_length=WHOLE))
