"""An executor whose results are row ids of values in a store, as those of a pool of workers are."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any, final

from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, StoredColumn, remote_of
from raydist.pipelines.elements.items import Item, StageResult
from raydist.pipelines.engine.executor import Executor, InlineExecutor, Pending
from raydist.pipelines.engine.kernel import StageSpec

__all__ = ["InStore", "StoringExecutor"]

_store: dict[int, bytes] = {}
_keys = itertools.count()


@final
class InStore(StoredColumn):
    """A column of a store that holds pickles."""

    def __init__(self, key: int, like: Any) -> None:
        self.key = key
        self.dtype, self.shape, self.row_bytes, self.shapes = like

    @classmethod
    def put(cls, column: Column) -> InStore:
        key = next(_keys)
        _store[key] = pickle.dumps(column)
        shapes = None
        if column.dtype == object and column.ndim == 1:
            shapes = [getattr(row, "shape", ()) for row in column]
            if not any(shapes):
                shapes = None
        return cls(key, (column.dtype, column.shape, 8, shapes))

    def __reduce__(self) -> tuple[Any, ...]:
        return InStore, (self.key, (self.dtype, self.shape, self.row_bytes, self.shapes))

    def load(self) -> Column:
        column: Column = pickle.loads(_store[self.key])
        column.flags.writeable = False
        return column


@final
class StoringExecutor(Executor):
    """Runs stages in `submit`, on blocks that were pickled, and stores all columns of tensors and text."""

    place = "actors"
    stores_results = True
    window = 3

    def __init__(self, options: Options | None = None) -> None:
        self.num_fetched = 0

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        self.num_fetched += block.is_remote
        if not block.holds_objects:
            block = pickle.loads(pickle.dumps(block))
        result = InlineExecutor().submit(spec, block.in_memory(), starts).result()
        return _Done(replace(result, items=tuple(map(_stored, result.items))))

    def close(self) -> None:
        """Nothing runs."""


def _stored(item: Item) -> Item:
    if not isinstance(item, Block) or item.holds_objects:
        return item
    columns = [column if _is_text_batch(column) else remote_of(InStore.put(column)) for column in item.columns]
    return Block(item.structure, item.specs, tuple(columns), item.num_rows)


def _is_text_batch(column: Column) -> bool:
    return bool(column.dtype == object and column.ndim > 1)


@final
class _Done(Pending):
    def __init__(self, value: StageResult) -> None:
        self._value = value

    def result(self) -> StageResult:
        return self._value
