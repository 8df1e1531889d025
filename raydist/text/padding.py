"""Sequences of ids to one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import pyarrow as pa

from raydist.errors import InvalidArgumentError, SpecError
from raydist.text.convert import is_list, offsets_of
from raydist.text.step import TextStep

__all__ = ["PadTo"]


@final
@dataclass(frozen=True)
class PadTo(TextStep):
    """Every sequence of ids cut at `length`, or filled up with `pad_id`: int64 of shape (..., length).

    Attributes:
        length: Ids in every result, >= 1.
        pad_id: Stands behind a shorter sequence.

    Raises:
        InvalidArgumentError: `length` < 1.

    Source: the padding of tf.keras.layers.TextVectorization(output_sequence_length=...).

    >>> rd.text.PadTo(3)(np.array([[7, 8, 9, 10], [1, 2, 3, 4]])).tolist(), rd.text.PadTo(3)([5]).tolist()
    ([[7, 8, 9], [1, 2, 3]], [5, 0, 0])
    """

    takes_lists: ClassVar[bool] = True
    length: int
    pad_id: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or self.length < 1:
            raise InvalidArgumentError(f"length must be an int >= 1, got {self.length!r}.")

    def apply(self, array: pa.Array) -> pa.Array:
        """Fixed-size lists."""
        if not is_list(array) or not pa.types.is_int64(array.type.value_type):
            raise SpecError(
                f"PadTo takes sequences of ids, got {array.type}. Make tokens into ids before, by a Vocabulary or "
                "HashBuckets."
            )
        offsets = offsets_of(array)
        places = np.arange(self.length)
        filled = places < np.diff(offsets)[:, np.newaxis]
        padded = np.full(filled.shape, self.pad_id, np.int64)
        padded[filled] = array.values.to_numpy()[(offsets[:-1, np.newaxis] + places)[filled]]
        return pa.FixedSizeListArray.from_arrays(pa.array(padded.ravel()), self.length)
