"""Dataset.from_numpy: the rows of .npy and .npz files."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.core.nest import LEAF, Structure, flatten, unflatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.formats.files import local_path, open_file, path_text, require_limit
from raydist.pipelines.formats.numpy_format import StoredArray, stored_array, stored_arrays
from raydist.pipelines.sources.memory import IndexedSourceOp, MemoryOp, is_consecutive


def numpy_op(source: Any, verify: bool = True, max_array_bytes: int | None = None) -> DatasetOp:
    """Return the operation for the arguments of `from_numpy`: a path, or arrays in memory."""
    require_limit("max_array_bytes", max_array_bytes)
    if isinstance(source, str | bytes | os.PathLike):
        return NumpyFileOp.of(source, verify, max_array_bytes)
    return MemoryOp.of_slices(source)


@dataclass(frozen=True, eq=False)
class NumpyFileOp(IndexedSourceOp):
    """The rows of the arrays of one file, which every reading process opens: pickles contain only the description."""

    structure: Structure  # one leaf for .npy, a dict for .npz
    arrays: tuple[StoredArray, ...]  # in the order of the leaves, with equal first dimensions
    # True to compare checksums before the first row is handed out.
    verify: bool = field(default=True, metadata={"fingerprint": False})
    name = "from_numpy"

    @classmethod
    def of(cls, path: Any, verify: bool = True, max_array_bytes: int | None = None) -> NumpyFileOp:
        """Read the headers of the file at `path`."""
        text = path_text(path)
        local = local_path(text)
        if local is None:
            raise InvalidArgumentError(
                f"from_numpy maps files into memory and needs a local path, got {text!r}. Copy the file, or read it "
                "with fsspec and give the array itself."
            )
        op = cls(*_describe(local, max_array_bytes), verify)
        op._require_rows()
        return op

    def _require_rows(self) -> None:
        names = {array.member or array.path: array.shape for array in self.arrays}
        if any(shape == () for shape in names.values()):
            raise InvalidArgumentError(f"from_numpy needs arrays with a first dimension to slice, got shapes {names}.")
        if len({shape[0] for shape in names.values()}) > 1:
            raise InvalidArgumentError(f"All arrays must have the same first dimension, got shapes {names}.")

    @property
    def label(self) -> str:
        return f"from_numpy({self.arrays[0].path!r})"

    @property
    def gives_rows(self) -> bool:
        return all(len(array.shape) <= 2 for array in self.arrays)  # each entry of a larger array may be a batch

    def element_spec(self) -> Any:
        return unflatten(self.structure, _specs(self.arrays))

    def random_access(self) -> RandomAccess:
        return self._access

    @cached_property
    def _access(self) -> RandomAccess:
        # Shared by all passes: compressed arrays are loaded, and checksums compared, once.
        return _NumpyAccess(self.arrays, self.structure, self.verify)


@dataclass(frozen=True, eq=False)
class FileAccess(RandomAccess):
    """The rows of arrays in files. An array has a `shape`, `load` and `require_whole`, as a StoredArray."""

    portable: ClassVar[bool] = True
    arrays: Sequence[Any]  # of one first dimension

    def __len__(self) -> int:
        return int(self.arrays[0].shape[0])

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # without loaded arrays

    def load(self) -> list[Any]:
        """Return the arrays."""
        return [array.load() for array in self.arrays]

    @abstractmethod
    def block(self, rows: Sequence[Any], count: int) -> Block:
        """Return `count` elements, given their rows of each array."""

    @cached_property
    def _loaded(self) -> list[Any] | DataLossError:
        """The arrays, or the error: a damaged file is not read again for each of its rows."""
        try:
            return self.load()
        except DataLossError as loss:
            return loss.with_traceback(None)

    def gather(self, indices: Any) -> Block:
        loaded = self._loaded
        if isinstance(loaded, DataLossError):
            raise copy.copy(loaded)
        for array in self.arrays:
            array.require_whole()
        rows = slice(int(indices[0]), int(indices[-1]) + 1) if is_consecutive(indices) else indices  # without a copy
        return self.block([array[rows] for array in loaded], len(indices))


@dataclass(frozen=True, eq=False)
class _NumpyAccess(FileAccess):
    structure: Structure
    verify: bool = True

    def load(self) -> list[Any]:
        return [array.load(verify=self.verify) for array in self.arrays]

    def block(self, rows: Sequence[Any], count: int) -> Block:
        """Return the rows in native byte order, text as Python objects."""
        return Block(self.structure, _specs(tuple(self.arrays)), tuple(map(as_leaf, rows)), count)


def _describe(path: str, max_array_bytes: int | None) -> tuple[Structure, tuple[StoredArray, ...]]:
    """Return the structure of one element, and the arrays in leaf order."""
    opened = open_file(path)
    with closing(opened.file):
        if path.endswith(".npy"):
            return LEAF, (stored_array(path, opened.file, opened.size or 0),)
        if path.endswith(".npz"):
            found = stored_arrays(path, opened.file, opened.size or 0, max_array_bytes)
            arrays = {array.member: array for array in found}
            structure = flatten(dict.fromkeys(arrays))[1]
            return structure, tuple(arrays[name] for name in structure.keys)
    raise InvalidArgumentError(f"from_numpy reads files named .npy or .npz, got {path!r}.")


def _specs(arrays: tuple[StoredArray, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(array.shape[1:], array.dtype.newbyteorder("=")) for array in arrays)
