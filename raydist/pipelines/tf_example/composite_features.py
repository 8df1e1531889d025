"""Features of a tf.train.Example that are sequences, or consist of several lists; and the union of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.pipelines.tf_example.features import (
    FixedLenFeature,
    VarLenFeature,
    feature_dtype,
    fixed_shape,
    typed_default,
)
from raydist.pipelines.tf_example.ragged_features import RaggedFeature

__all__ = [
    "Feature",
    "FixedLenSequenceFeature",
    "SparseFeature",
    "SparseTensorValue",
]


@final
class SparseTensorValue(NamedTuple):
    """A sparse tensor (tf.compat.v1.SparseTensorValue): the value of a :class:`SparseFeature`.

    `torch.sparse_coo_tensor(indices.T, values, tuple(dense_shape))` returns a torch tensor.

    Attributes:
        indices: Positions of the k values, int64 of shape (k, rank), in ascending order.
        values: The values, of shape (k,): int64, float32, or bytes in an object array.
        dense_shape: Shape of the whole tensor, int64 of shape (rank,).

    Source: tf.compat.v1.SparseTensorValue (TensorFlow 2.x API).

    >>> sparse = SparseTensorValue(np.array([[0, 2], [1, 0]]), np.array([5, 6]), np.array([2, 3]))
    >>> dense = np.zeros(sparse.dense_shape, np.int64)
    >>> dense[tuple(sparse.indices.T)] = sparse.values
    >>> dense.tolist()
    [[0, 0, 5], [6, 0, 0]]
    """

    indices: Any
    values: Any
    dense_shape: Any


@final
@dataclass(frozen=True, slots=True, init=False, eq=False)
class FixedLenSequenceFeature:
    """A feature whose number of values is a multiple of one item's (tf.io.FixedLenSequenceFeature).

    Parsed into an array of shape (k, *shape) for k items; for a batch of n records into an array of shape (n, longest,
    *shape), padded with `default_value`.

    Args:
        shape: Shape of one item, all dimensions known and >= 1; () for one value, one number for a vector.
        dtype: int64, float32 or bytes, given as numpy, torch or text.
        allow_missing: Must be True: a record without the feature has no items.
        default_value: One value that pads short rows; 0 or b"" by default.

    Attributes:
        shape: Shape as a tuple.
        dtype: The numpy dtype.
        default_value: An array of shape ().

    Raises:
        InvalidArgumentError: An argument is out of range.

    Source: tf.io.FixedLenSequenceFeature (TensorFlow 2.x API).

    >>> FixedLenSequenceFeature((2,), "int64", allow_missing=True).num_values
    2
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    default_value: np.ndarray[Any, Any]

    def __init__(self, shape: Any, dtype: Any, allow_missing: bool = False, default_value: Any = None) -> None:
        if not allow_missing:
            raise InvalidArgumentError(
                f"A FixedLenSequenceFeature must have allow_missing=True, got {allow_missing!r}: parse_example takes a "
                "record without the feature for one without items. Use FixedLenFeature for one that must be there."
            )
        found = feature_dtype(dtype)
        empty: Any = b"" if found.kind == "S" else 0
        dims = fixed_shape(shape, type(self).__name__, least=1)
        filler = typed_default(empty if default_value is None else default_value, found, ())
        object.__setattr__(self, "shape", dims)
        object.__setattr__(self, "dtype", found)
        object.__setattr__(self, "default_value", filler)

    @property
    def num_values(self) -> int:
        """Number of values of one item: the product of the dimensions.

        >>> FixedLenSequenceFeature((2, 3), "int64", allow_missing=True).num_values
        6
        """
        return int(np.prod(self.shape, dtype=np.int64))


@final
@dataclass(frozen=True, slots=True, init=False)
class SparseFeature:
    """A sparse tensor whose indices and values are separate features (tf.io.SparseFeature).

    Parsed into a :class:`SparseTensorValue` of shape `size`; for a batch of n records of shape (n, *size).

    Args:
        index_key: Feature of int64 with the indices; one for each dimension.
        value_key: Feature with the values, as many as indices.
        dtype: Dtype of the values: int64, float32 or bytes, given as numpy, torch or text.
        size: Size of each dimension: indices must be smaller.
        already_sorted: True if the indices ascend, and need not be sorted.

    Attributes:
        index_keys: Features of the indices, one for each dimension.
        value_key: Feature of the values.
        dtype: The numpy dtype of the values.
        sizes: Sizes of the dimensions, one for each index key.
        already_sorted: True if the indices ascend.

    Raises:
        InvalidArgumentError: The numbers of sizes and index keys differ, or a size is < 1.

    Source: tf.io.SparseFeature (TensorFlow 2.x API).

    >>> SparseFeature("words", "counts", "int64", size=1000)
    SparseFeature(index_keys=('words',), value_key='counts', dtype=dtype('int64'), sizes=(1000,), already_sorted=False)
    """

    index_keys: tuple[str, ...]
    value_key: str
    dtype: np.dtype[Any]
    sizes: tuple[int, ...]
    already_sorted: bool

    def __init__(
        self,
        index_key: str | Sequence[str],
        value_key: str,
        dtype: Any,
        size: int | Sequence[int],
        already_sorted: bool = False,
    ) -> None:
        keys = (index_key,) if isinstance(index_key, str) else tuple(index_key)
        sizes = fixed_shape(size, type(self).__name__, least=1)
        if len(keys) != len(sizes) or not keys:
            raise InvalidArgumentError(
                f"A SparseFeature needs one size for each index key, got {len(sizes)} sizes ({size!r}) and {len(keys)} "
                f"keys ({index_key!r})."
            )
        object.__setattr__(self, "index_keys", keys)
        object.__setattr__(self, "value_key", value_key)
        object.__setattr__(self, "dtype", feature_dtype(dtype))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "already_sorted", already_sorted)


Feature = FixedLenFeature | FixedLenSequenceFeature | VarLenFeature | SparseFeature | RaggedFeature
