"""What travels from an input pipeline to the replicas: pieces of batches in the object store, and steps that name them.

Numbers travel as dense arrays, bytes and text as Arrow columns: pickling hands their buffers over as they are, so a
piece is written into the store once, and read where it lies.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from raydist.nest import Structure
    from raydist.pipelines.run.split import Columns, Cut

__all__ = ["BatchPiece", "PackedText", "Ref", "StepBatch", "pack_piece", "store_step"]

_Array = np.ndarray[Any, np.dtype[Any]]
Ref = Any  # a ray.ObjectRef of a BatchPiece, a SharedPiece, or a small BatchPiece itself; None for none

_INLINE_BYTES = 16 << 10  # a smaller piece travels with its step: to store one costs 0.8 ms, whatever its size


@final
@dataclass(frozen=True, slots=True, eq=False)
class PackedText:
    """An array of bytes or str as one Arrow column.

    Attributes:
        values: The entries in C order, large_binary or large_string.
        shape: Shape of the array.
    """

    values: pa.Array
    shape: tuple[int, ...]

    def unpack(self) -> _Array:
        """The array of Python objects."""
        return np.asarray(self.values.to_numpy(zero_copy_only=False), dtype=object).reshape(self.shape)


@final
@dataclass(frozen=True, slots=True, eq=False)
class BatchPiece:
    """One replica's piece of one global batch, as the object store holds it.

    Attributes:
        columns: One per leaf.
        num_rows: Rows of the first leaf.
        zero_copy: Hand out the store's own memory instead of a private copy.
        absent: False: a piece is input, and input is always there, if only with zero rows.
    """

    columns: tuple[_Array | PackedText, ...]
    num_rows: int
    zero_copy: bool = False
    absent: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers."""
        return sum(column.values.nbytes if isinstance(column, PackedText) else column.nbytes for column in self.columns)

    def array(self, index: int) -> _Array:
        """Leaf `index`: for numbers read-only and without a copy."""
        column = self.columns[index]
        return column.unpack() if isinstance(column, PackedText) else column

    def leaf(self, index: int, place: int = 0) -> Any:
        """Leaf `index` as a torch tensor on the CPU; bytes and text as a numpy object array (a scalar as itself).

        The tensor is private and writable. With `zero_copy` it is the object store's memory, shared with every process
        that maps this piece: torch does not know that it must not be written.
        """
        array = self.array(index)
        if array.dtype == object:
            return array if array.ndim else array.item()
        import torch  # an input pipeline handles pieces too and has no use for torch

        if not self.zero_copy:
            return torch.from_numpy(np.array(array))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)


def pack_piece(columns: Columns, num_rows: int, *, zero_copy: bool) -> BatchPiece:
    """The piece to store for one replica's columns."""
    return BatchPiece(tuple(_pack_column(column) for column in columns), num_rows, zero_copy)


def _pack_column(column: _Array) -> _Array | PackedText:
    if column.dtype != object:
        return column
    entries = column.reshape(-1).tolist()
    kind = pa.large_string() if entries and isinstance(entries[0], str) else pa.large_binary()
    try:
        return PackedText(pa.array(entries, kind), column.shape)
    except UnicodeEncodeError:  # text that is no Unicode (file names may be so) travels as Python objects
        return column


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One global batch, as references to its pieces.

    Attributes:
        step: Index of the batch in its epoch.
        refs: Each replica's piece, zero rows included, or a small piece itself; None in another replica's view.
        stand_ins: For a replica without rows: a piece of up to two rows of the same global batch.
        rows: Rows of each piece.
        structure: The nest of a batch.
    """

    step: int
    refs: tuple[Ref, ...]
    stand_ins: tuple[Ref, ...]
    rows: tuple[int, ...]
    structure: Structure

    def only(self, rank: int) -> StepBatch:
        """This step with the pieces of one replica: a process that holds a reference takes part in counting it."""
        return replace(self, refs=_only(self.refs, rank), stand_ins=_only(self.stand_ins, rank))


def _only(refs: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    return tuple(ref if index == rank else None for index, ref in enumerate(refs))


def store_step(
    cuts: tuple[Cut, ...], *, step: int, structure: Structure, put: Any, zero_copy: bool = False
) -> StepBatch:
    """Write the pieces of one step with `put` (each once; small ones not at all) and give the step that names them."""

    def store(columns: Columns | None, num_rows: int) -> Ref:
        if columns is None:
            return None
        piece = pack_piece(columns, num_rows, zero_copy=zero_copy)
        return put(piece) if piece.num_bytes > _INLINE_BYTES else piece

    refs = tuple(store(cut.columns, cut.num_rows) for cut in cuts)
    stand_ins = tuple(store(cut.stand_in, 0) for cut in cuts)
    return StepBatch(step, refs, stand_ins, tuple(cut.num_rows for cut in cuts), structure)
