"""The rows of splits: only what a split spec names is read, as far as the source can be read by index."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import unflatten
from raydist.dataset import Dataset
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.declared_output import DeclaredOutput
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.ops.combine import ConcatenateOp, common_spec
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.ops.selection import SkipOp, TakeOp
from raydist.pipelines.sources.memory import IndexedSourceOp
from raydist.pipelines.sources.range import RangeOp
from raydist.pipelines.sources.table_files import FileSplitsOp, SplitFilesOp, TableFilesOp
from raydist.pipelines.sources.torch_datasets import SampleReader
from raydist.pipelines.stored.read import SavedFormat, saved_rows


class Rows(NamedTuple):
    """The elements `start` .. `stop` - 1 of a dataset."""

    dataset: Dataset
    start: int
    stop: int


@dataclass(frozen=True)
class Supervised:
    """A function that makes (features, label) of an example, which is a dict.

    `features` is a key, or several, of which a dict is made; None for all but the label's.
    """

    features: str | tuple[str, ...] | None
    label: str

    def __call__(self, example: Mapping[str, Any]) -> tuple[Any, Any]:
        if isinstance(self.features, str):
            return example[self.features], example[self.label]
        names = (name for name in example if name != self.label) if self.features is None else self.features
        return {name: example[name] for name in names}, example[self.label]

    def check(self, example: Any) -> None:
        """Raise InvalidArgumentError if an example has not got these keys."""
        wanted = {self.label, *((self.features,) if isinstance(self.features, str) else self.features or ())}
        if not isinstance(example, Mapping) or not wanted <= {*example}:
            found = list(example) if isinstance(example, Mapping) else example
            raise InvalidArgumentError(
                f"as_supervised needs examples with the keys {sorted(wanted)}, got {found!r:.300}. Load this split "
                "without as_supervised."
            )


def joined_rows(parts: Sequence[Rows], supervised: Supervised | None = None) -> Dataset:
    """Return the rows of all `parts`, one after the other; of (features, label) pairs if `supervised`.

    What can be read by index stays so: `global_shuffle` of the result works, and nothing else is read. A prepared or
    Parquet split begins with the chunk of its first row. Other datasets are read from their beginning.
    """
    ops = [part.dataset._op for part in parts]
    if supervised is not None:
        supervised.check(ops[0].element_spec())
    if all(op.random_access() is not None for op in ops):
        pieces = tuple((op, part.start, part.stop) for op, part in zip(ops, parts, strict=True))
        return Dataset(SliceOp(pieces, supervised))
    if all(isinstance(op, MapOp) and isinstance(op.fn, SampleReader) for op in ops):
        return Dataset(_samples_op([op for op in ops if isinstance(op, MapOp)], parts, supervised))
    joined, *others = (_piece(op, part.start, part.stop) for op, part in zip(ops, parts, strict=True))
    for other in others:
        joined = ConcatenateOp(joined, other)
    if supervised is not None:
        joined = MapOp(joined, supervised, output=DeclaredOutput.parse(supervised(joined.element_spec())))
    return Dataset(joined)


def _samples_op(ops: Sequence[MapOp], parts: Sequence[Rows], supervised: Supervised | None) -> MapOp:
    samples = _Samples(tuple((op.fn, part.start, part.stop) for op, part in zip(ops, parts, strict=True)), supervised)
    output = None
    if all(op.output is not None for op in ops):
        spec = common_spec(ops)
        output = DeclaredOutput.parse(spec if supervised is None else supervised(spec))
    return replace(ops[0], input=RangeOp(0, len(samples)), fn=SampleReader(samples), output=output)


def _piece(op: DatasetOp, start: int, stop: int) -> DatasetOp:
    """Return the elements `start` .. `stop` - 1 of an operation without random access."""
    if (start, stop) == (0, op.cardinality()):
        return op
    if isinstance(op, TableFilesOp) and isinstance(op.format, SavedFormat):
        op, start, stop = saved_rows(op, op.format, start, stop)
    elif isinstance(op, SplitFilesOp) and isinstance(op.splits, FileSplitsOp) and op.num_rows >= 0:
        op, start, stop = _file_pieces(op, op.splits, start, stop)
    return TakeOp(SkipOp(op, start), stop - start)


def _file_pieces(op: SplitFilesOp, splits: FileSplitsOp, start: int, stop: int) -> tuple[DatasetOp, int, int]:
    """Return the pieces of files with the rows `start` .. `stop` - 1, and the numbers of these rows in the pieces."""
    ends = np.cumsum([split.num_rows for split in splits.splits])
    first = int(np.searchsorted(ends, start, side="right"))
    end = int(np.searchsorted(ends, stop, side="left")) + 1
    kept = splits.splits[first:end] if stop > start else ()
    before = int(ends[first - 1]) if first else 0
    num_rows = sum(split.num_rows for split in kept)
    return replace(op, splits=FileSplitsOp(kept), num_rows=num_rows), start - before, stop - before


@dataclass(frozen=True, eq=False)
class SliceOp(IndexedSourceOp):
    """The rows `start` .. `stop` - 1 of each of several operations with random access."""

    parts: tuple[tuple[DatasetOp, int, int], ...]
    supervised: Supervised | None = None
    gives_rows = True
    name = "load"

    @property
    def label(self) -> str:
        shown = (f"{op.label}[{start}:{stop}]" for op, start, stop in self.parts)
        return f"load({' + '.join(shown):.120})"

    @property
    def has_declared_shapes(self) -> bool:
        return all(op.has_declared_shapes for op, _, _ in self.parts)

    def element_spec(self) -> Any:
        spec = common_spec([op for op, _, _ in self.parts])
        return spec if self.supervised is None else self.supervised(spec)

    def random_access(self) -> RandomAccess:
        return self._access

    @cached_property
    def _access(self) -> RandomAccess:
        found = ((op.random_access(), start, stop) for op, start, stop in self.parts)
        parts = tuple((access, start, stop) for access, start, stop in found if access is not None)
        return _SliceAccess(parts, self.supervised)


@dataclass(frozen=True, eq=False)
class _SliceAccess(RandomAccess):
    parts: tuple[tuple[RandomAccess, int, int], ...]
    supervised: Supervised | None

    @property
    def portable(self) -> bool:  # type: ignore[override]  # a class variable in the base class
        return all(access.portable for access, _, _ in self.parts)

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts, "supervised": self.supervised}

    @cached_property
    def _ends(self) -> np.ndarray[Any, Any]:
        return np.cumsum([stop - start for _, start, stop in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, indices: Any) -> Block:
        rows = np.asarray(indices)
        places = np.searchsorted(self._ends, rows, side="right")
        if not len(rows) or (places == places[0]).all():
            return self._of_part(int(places[0]) if len(rows) else 0, rows)
        order = np.argsort(places, kind="stable")
        numbers, firsts = np.unique(places[order], return_index=True)
        groups = np.split(rows[order], firsts[1:])
        blocks = [self._of_part(int(number), group) for number, group in zip(numbers, groups, strict=True)]
        return concat_blocks(blocks).take(np.argsort(order))

    def _of_part(self, number: int, rows: np.ndarray[Any, Any]) -> Block:
        access, start, stop = self.parts[number]
        block = access.gather(rows - int(self._ends[number]) + stop)
        return block if self.supervised is None else _select(block, self.supervised)


def _select(block: Block, supervised: Supervised) -> Block:
    """Return the (features, label) pairs of a block of dicts. Copies nothing."""
    numbers, structure = flatten_element(supervised(unflatten(block.structure, range(len(block.columns)))))
    specs = tuple(block.specs[number] for number in numbers)
    return Block(structure, specs, tuple(block.columns[number] for number in numbers), block.num_rows)


@dataclass(frozen=True, eq=False)
class _Samples:
    """The samples of parts of map-style datasets, as one map-style dataset."""

    parts: tuple[tuple[Any, int, int], ...]  # function of an index, first index, end
    supervised: Supervised | None

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(stop - start for _, start, stop in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number = next(number for number, end in enumerate(self._ends) if index < end)
        read, _, stop = self.parts[number]
        sample = read(index - self._ends[number] + stop)
        return sample if self.supervised is None else self.supervised(sample)
