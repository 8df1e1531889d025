"""Positions of the values of one feature in serialized records of one layout, and their vectorised decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

__all__ = ["MAX_VARINT", "Bytes", "Floats", "Integers", "Values"]

MAX_VARINT = 10
"""Largest number of bytes of a 64-bit number."""

_Matrix = np.ndarray[Any, np.dtype[np.uint8]]


@final
@dataclass(frozen=True, slots=True)
class Bytes:
    """The positions of values of bytes.

    Attributes:
        spans: Start and end of each value.
    """

    spans: tuple[tuple[int, int], ...]
    kind = "bytes_list"

    def __len__(self) -> int:
        return len(self.spans)

    def free_bits(self, mask: _Matrix) -> None:
        """Clear the bits of `mask` that may differ between records."""
        for start, end in self.spans:
            mask[start:end] = 0

    def decode(self, records: Sequence[bytes], matrix: _Matrix) -> np.ndarray[Any, Any]:
        """Return the values of all records, shape (records, values)."""
        column = np.empty((len(records), len(self.spans)), dtype=object)
        for number, (start, end) in enumerate(self.spans):
            column[:, number] = [record[start:end] for record in records]
        return column


@final
@dataclass(frozen=True, slots=True)
class Floats:
    """The positions of values of float32.

    Attributes:
        starts: First of the four bytes of each value.
    """

    starts: tuple[int, ...]
    kind = "float_list"

    def __len__(self) -> int:
        return len(self.starts)

    def free_bits(self, mask: _Matrix) -> None:
        """Clear the bits of `mask` that may differ between records."""
        for start in self.starts:
            mask[start : start + 4] = 0

    def decode(self, records: Sequence[bytes], matrix: _Matrix) -> np.ndarray[Any, Any]:
        """Return the values of all records, shape (records, values)."""
        if not self.starts:
            return np.empty((len(records), 0), np.float32)
        places = np.add.outer(np.array(self.starts), np.arange(4)).ravel()
        together = places[-1] - places[0] == len(places) - 1
        found = matrix[:, places[0] : places[-1] + 1] if together else matrix[:, places]
        return np.ascontiguousarray(found).view("<f4").astype(np.float32, copy=False)


@final
@dataclass(frozen=True, slots=True)
class Integers:
    """The positions of values of int64, as varints: seven bits per byte; the eighth bit announces another byte.

    Attributes:
        starts: First byte of each value.
        widths: Bytes of each value.
    """

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    kind = "int64_list"

    def __len__(self) -> int:
        return len(self.starts)

    def free_bits(self, mask: _Matrix) -> None:
        """Clear the bits of `mask` that may differ between records: all but the bits that determine the widths."""
        for start, width in zip(self.starts, self.widths, strict=True):
            mask[start : start + width] = 0x80
            if width == MAX_VARINT:
                mask[start + width - 1] = 0xFE  # a 64-bit number uses only one bit of this byte

    def decode(self, records: Sequence[bytes], matrix: _Matrix) -> np.ndarray[Any, Any]:
        """Return the values of all records, shape (records, values)."""
        if max(self.widths, default=1) == 1:
            return matrix[:, list(self.starts)].astype(np.int64)
        widths = np.array(self.widths)
        firsts = np.cumsum(widths) - widths
        within = np.arange(widths.sum()) - np.repeat(firsts, widths)
        found = (matrix[:, np.repeat(self.starts, widths) + within] & 0x7F).astype(np.uint64)
        found <<= (7 * within).astype(np.uint64)
        return np.add.reduceat(found, firsts, axis=1).view(np.int64)


Values = Bytes | Floats | Integers
