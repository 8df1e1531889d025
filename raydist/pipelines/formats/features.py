"""What a feature of a tf.train.Example is to become: shape, dtype and what stands in where it is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.pipelines.spec import BYTES, as_dtype

__all__ = ["Feature", "FixedLenFeature", "VarLenFeature", "list_field"]

_LIST_FIELDS = {np.dtype(np.int64): "int64_list", np.dtype(np.float32): "float_list", BYTES: "bytes_list"}


def list_field(dtype: np.dtype[Any]) -> str:
    """The field of the message that holds values of `dtype`."""
    return _LIST_FIELDS[dtype]


def _feature_dtype(dtype: Any) -> np.dtype[Any]:
    found = as_dtype(dtype)
    if found not in _LIST_FIELDS:
        raise InvalidArgumentError(
            f"A feature's dtype must be int64, float32 or bytes (what a tf.train.Example holds), got {dtype!r}. "
            "Parse as one of these and convert afterwards."
        )
    return found


@final
@dataclass(frozen=True, slots=True, init=False, eq=False)
class FixedLenFeature:
    """A feature with the same number of values in every record (tf.io.FixedLenFeature).

    Parsed into an array of shape `shape`: (n, *shape) for a batch of n.

    Args:
        shape: All dimensions known; () for one value.
        dtype: int64, float32 or bytes, given as numpy, torch or text.
        default_value: Stands in where the feature is missing: one value, or an array of `shape`. Without it, a record
            that lacks the feature is an error.

    >>> FixedLenFeature((2,), "float32", default_value=0)
    FixedLenFeature(shape=(2,), dtype=float32, default_value=[0.0, 0.0])
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    default_value: np.ndarray[Any, Any] | None

    def __init__(self, shape: Any, dtype: Any, default_value: Any = None) -> None:
        dims = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        if not all(isinstance(dim, int | np.integer) and dim >= 0 for dim in dims):
            raise InvalidArgumentError(
                f"A FixedLenFeature's shape must hold only numbers >= 0, got {shape!r}. Use VarLenFeature for lengths "
                "that differ."
            )
        object.__setattr__(self, "shape", tuple(int(dim) for dim in dims))
        object.__setattr__(self, "dtype", _feature_dtype(dtype))
        object.__setattr__(self, "default_value", self._default(default_value))

    def _default(self, value: Any) -> np.ndarray[Any, Any] | None:
        if value is None:
            return None
        try:
            array = np.asarray(value, dtype=object if self.dtype == BYTES else None)
            self._require_kind(array)
            return np.array(np.broadcast_to(array.astype(column_dtype(self.dtype)), self.shape))
        except (ValueError, TypeError) as error:
            name = "bytes" if self.dtype == BYTES else self.dtype.name
            raise InvalidArgumentError(
                f"default_value must be one {name} value or an array of shape {self.shape}, got {value!r}."
            ) from error

    def _require_kind(self, array: np.ndarray[Any, Any]) -> None:
        if array.ndim and array.shape != self.shape:
            raise ValueError(array.shape)
        if self.dtype == BYTES and not all(isinstance(item, bytes) for item in array.flat):
            raise TypeError(array)
        if self.dtype != BYTES and not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(array.dtype)

    def __repr__(self) -> str:
        name = "bytes" if self.dtype == BYTES else self.dtype.name
        default = None if self.default_value is None else self.default_value.tolist()
        return f"FixedLenFeature(shape={self.shape}, dtype={name}, default_value={default})"

    @property
    def num_values(self) -> int:
        """Values of one record."""
        return int(np.prod(self.shape, dtype=np.int64))


@final
@dataclass(frozen=True, slots=True, init=False)
class VarLenFeature:
    """A feature with any number of values, none included (tf.io.VarLenFeature).

    Parsed into an array of shape (k,): k differs from record to record. For a batch: an object array of n such arrays,
    where TensorFlow gives a SparseTensor.

    Args:
        dtype: int64, float32 or bytes, given as numpy, torch or text.
    """

    dtype: np.dtype[Any]

    def __init__(self, dtype: Any) -> None:
        object.__setattr__(self, "dtype", _feature_dtype(dtype))


Feature = FixedLenFeature | VarLenFeature


def column_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of an array of such values: bytes of any length live in an object array."""
    return np.dtype(object) if dtype == BYTES else dtype
