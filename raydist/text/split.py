"""Splitting text into tokens, and padding sequences of ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.text.step import TextStep, is_list, list_array, offsets_of


@final
@dataclass(frozen=True)
class Split(TextStep):
    """Tokens between white space, or between separators: exactly those of Python's `str.split`.

    Attributes:
        separator: What stands between two tokens; None for any amount of Unicode white space, where no token is empty.

    Raises:
        InvalidArgumentError: The separator is empty.

    Source: tf.strings.split, str.split.

    >>> rd.text.Split()(" to be  or").tolist(), rd.text.Split(",")("a,,b").tolist()
    (['to', 'be', 'or'], ['a', '', 'b'])
    """

    separator: str | None = None

    def __post_init__(self) -> None:
        if self.separator is not None and not (isinstance(self.separator, str) and self.separator):
            raise InvalidArgumentError(
                f"separator must be a str of at least one character, or None for white space, got {self.separator!r}. "
                "rd.text.Characters() splits into characters."
            )

    def apply(self, array: pa.Array) -> pa.Array:
        """Lists of tokens."""
        require_text(array, "Split")
        if self.separator is not None:
            return _as_large(pc.split_pattern(array, self.separator))
        trimmed = pc.utf8_trim_whitespace(array)
        lists = pc.utf8_split_whitespace(trimmed)
        # Nothing but white space is one empty token for Arrow, and none for Python.
        offsets, empty = offsets_of(lists), pc.binary_length(trimmed).to_numpy() == 0
        if not empty.any():
            return list_array(offsets, lists.values)
        kept = np.ones(len(lists.values), bool)
        kept[offsets[:-1][empty]] = False
        return list_array(offsets - np.append(0, np.cumsum(empty)), lists.values.filter(pa.array(kept)))


@final
@dataclass(frozen=True)
class Characters(TextStep):
    """One token for every Unicode code point, as `list(text)` gives.

    Source: tf.strings.unicode_split.

    >>> rd.text.Characters()("né").tolist()
    ['n', 'é']
    """

    def apply(self, array: pa.Array) -> pa.Array:
        """Lists of strings of one code point."""
        require_text(array, "Characters")
        _, offset_buffer, data = array.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
        if data is None or not len(array):
            return list_array(np.zeros(len(array) + 1), pa.array([], pa.large_string()))
        text = np.frombuffer(data, np.uint8)[: offsets[-1]]
        # In UTF-8 every byte but the first of a code point is 10xxxxxx.
        starts = np.flatnonzero((text & 0xC0) != 0x80)
        starts = starts[starts >= offsets[0]]
        ends = np.append(starts, offsets[-1])
        characters = pa.LargeStringArray.from_buffers(len(starts), pa.py_buffer(ends.astype(np.int64)), data)
        return list_array(np.searchsorted(starts, offsets), characters)


def require_text(array: pa.Array, what: str) -> None:
    """SpecError unless the entries are text."""
    if not pa.types.is_large_string(array.type):
        raise SpecError(f"{what} takes text, got {array.type}. It must come before the steps that make ids or tokens.")


def _as_large(lists: pa.Array) -> pa.Array:
    return list_array(offsets_of(lists), lists.values)


@final
@dataclass(frozen=True)
class Pad(TextStep):
    """Every sequence of ids cut at `length`, or filled up with `pad_id`: int64 of shape (..., length).

    Attributes:
        length: Ids in every result, >= 1.
        pad_id: Stands behind a shorter sequence.

    Raises:
        InvalidArgumentError: `length` < 1.

    Source: the padding of tf.keras.layers.TextVectorization(output_sequence_length=...).

    >>> rd.text.Pad(3)(np.array([[7, 8, 9, 10], [1, 2, 3, 4]])).tolist(), rd.text.Pad(3)([5]).tolist()
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
                f"Pad takes sequences of ids, got {array.type}. Make tokens into ids before, by a Vocabulary or "
                "HashBuckets."
            )
        offsets = offsets_of(array)
        places = np.arange(self.length)
        filled = places < np.diff(offsets)[:, np.newaxis]
        padded = np.full(filled.shape, self.pad_id, np.int64)
        padded[filled] = array.values.to_numpy()[(offsets[:-1, np.newaxis] + places)[filled]]
        return pa.FixedSizeListArray.from_arrays(pa.array(padded.ravel()), self.length)
