"""Steps on text, and chains of them; splitting and padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.pipelines.elements.blocks import object_column

_Array = np.ndarray[Any, np.dtype[Any]]


class TextStep(ABC):
    """One step: called with text, or with what another step made. Subclasses are frozen dataclasses with an `apply`.

    Attributes:
        takes_lists: True if an entry is a sequence.

    >>> import pyarrow.compute as pc
    >>> class Lower(rd.text.TextStep):
    ...     def apply(self, array):
    ...         return pc.utf8_lower(array)
    >>> Lower()(["Dog", "CAT"]).tolist()
    ['dog', 'cat']
    """

    takes_lists: ClassVar[bool] = False
    """True if an entry is a sequence: the last axis of an array without lists then holds the sequence."""

    @abstractmethod
    def apply(self, array: pa.Array) -> pa.Array:
        """The step on Arrow entries: what a call does between making Arrow of its argument and numpy of the result.

        Args:
            array: Text (large_string), int64, lists of either, or fixed-size lists.

        Returns:
            One entry of such a kind for each entry of `array`.

        Raises:
            SpecError: Entries of a kind that this step does not take.

        >>> import pyarrow as pa
        >>> rd.text.Split().apply(pa.array(["a b"], pa.large_string())).to_pylist()
        [['a', 'b']]
        """

    @final
    def __call__(self, values: Any) -> Any:
        """The step for one string, an array (or list) of strings of any shape, or the result of another step.

        Args:
            values: str, bytes that hold UTF-8, ids, or arrays of them.

        Returns:
            The same shape, with one entry for each: numbers as an int64 array, texts as an object array of str,
            sequences as an object array of arrays (`Pad`: as a further axis). For one string: its entry alone.

        Raises:
            InvalidArgumentError: A string is not valid UTF-8; the message has its row.
            SpecError: `values` are nothing that this step takes.
        """
        array, shape = to_arrow(values, fold=self.takes_lists)
        return from_arrow(self.apply(array), shape)


@final
@dataclass(frozen=True)
class Chain(TextStep):
    """The steps one after the other. Nothing in between becomes Python objects: faster than calling them in turn.

    Attributes:
        steps: At least one.

    Raises:
        InvalidArgumentError: There is none, or something else than a step.

    >>> encode = rd.text.Chain((rd.text.Split(), rd.text.HashBuckets(1000, first_id=1), rd.text.Pad(3)))
    >>> encode(["cat dog", ""]).tolist()
    [[940, 466, 0], [0, 0, 0]]
    """

    steps: tuple[TextStep, ...]

    def __post_init__(self) -> None:
        if not self.steps or not all(isinstance(step, TextStep) for step in self.steps):
            raise InvalidArgumentError(f"Chain needs a tuple of one step of rd.text or more, got {self.steps!r:.200}.")

    @property
    def takes_lists(self) -> bool:  # type: ignore[override]  # a constant of each other class, here that of the first step
        """True if an entry of the first step is a sequence."""
        return self.steps[0].takes_lists

    def apply(self, array: pa.Array) -> pa.Array:
        """Return the result of the last step."""
        for step in self.steps:
            array = step.apply(array)
        return array


def to_arrow(values: Any, *, fold: bool = False) -> tuple[pa.Array, tuple[int, ...]]:
    """Return `values` as Arrow entries, and their shape.

    Args:
        values: str, bytes, an array or list of them, an integer array, or an object array of arrays (lists).
        fold: Make lists of the last axis of an array that has none.
    """
    if isinstance(values, list) and not values:
        values = np.empty(0, np.int64 if fold else object)  # sequences are of ids
    outside = _outside(values)
    if outside.dtype == object and outside.size and isinstance(outside.flat[0], np.ndarray):
        return _lists(outside), outside.shape
    flat = _flat(outside)
    if not fold:
        return flat, outside.shape
    if outside.ndim == 0:
        raise SpecError(
            f"A sequence is needed, got the single value {values!r:.80}. Give a list, or split the text first."
        )
    length = outside.shape[-1]
    count = outside.size // length if length else int(np.prod(outside.shape[:-1]))
    return list_array(np.arange(count + 1) * length, flat), outside.shape[:-1]


def _outside(values: Any) -> _Array:
    if isinstance(values, str | bytes):
        return object_column([values]).reshape(())
    if isinstance(values, list):
        return object_column(values) if any(isinstance(item, str | bytes) for item in values) else np.array(values)
    return np.asarray(values)


def _flat(outside: _Array) -> pa.Array:
    if outside.dtype.kind in "iu":
        return pa.array(outside.ravel().astype(np.int64))
    if outside.dtype.kind in "OSU":
        return _text(outside.ravel().tolist())
    raise SpecError(f"Text must be str or bytes, and ids integers, got an array of {outside.dtype}.")


def _lists(outside: _Array) -> pa.Array:
    rows = [np.asarray(row) for row in outside.flat]
    deeper = [row.shape for row in rows if row.ndim != 1]
    if deeper:
        raise SpecError(f"Every entry must be a list, an array of one dimension, got an array of shape {deeper[0]}.")
    offsets = np.cumsum([0, *map(len, rows)])
    full = [row for row in rows if len(row)]  # an empty row may have any dtype
    return list_array(offsets, _flat(np.concatenate(full or rows)))


def _text(values: list[Any]) -> pa.Array:
    try:
        array = pa.array(values, pa.large_string())
    except (pa.ArrowException, UnicodeError, TypeError) as error:
        raise _not_text(values) or error from error
    if array.null_count:
        raise SpecError(f"Text must be str or bytes, got None in row {array.is_null().index(True).as_py()}.")
    return array


def _not_text(values: list[Any]) -> Exception | None:
    """Return the error for the first value that is no text."""
    for row, value in enumerate(values):
        if not isinstance(value, str | bytes):
            return SpecError(f"Text must be str or bytes, got {value!r:.80} ({type(value).__name__}) in row {row}.")
        try:
            value.decode() if isinstance(value, bytes) else value.encode()
        except UnicodeError as error:
            return InvalidArgumentError(
                f"Text must be valid UTF-8, got {value!r:.80} in row {row}: {error}. Decode it in a map before, with "
                'its own encoding or with errors="replace".'
            )
    return None


def from_arrow(array: pa.Array, shape: tuple[int, ...]) -> Any:
    """Return the entries of `array` as an array of `shape`; a single one (shape ()) as str, int64 or array."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        return _numpy(array.flatten()).reshape(*shape, kind.list_size)
    if not is_list(array):
        flat = _numpy(array)
        return flat.reshape(shape) if shape else flat[0]
    values, offsets = _numpy(array.values), offsets_of(array)
    rows = [values[start:stop] for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
    return object_column(rows).reshape(shape) if shape else rows[0]


def _numpy(array: pa.Array) -> _Array:
    numbers: _Array = array.to_numpy(zero_copy_only=False)
    return numbers if numbers.flags.writeable else numbers.copy()


def is_list(array: pa.Array) -> bool:
    """Return True if the entries are lists of any length."""
    return bool(pa.types.is_list(array.type) or pa.types.is_large_list(array.type))


def list_array(offsets: Any, values: pa.Array) -> pa.Array:
    """Return lists; list i is `values[offsets[i]:offsets[i + 1]]`."""
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)


def offsets_of(array: pa.Array) -> _Array:
    """Return the offsets of lists into `array.values`."""
    offsets: _Array = array.offsets.to_numpy()
    return offsets


def map_values(array: pa.Array, fn: Any) -> pa.Array:
    """Apply `fn` to all entries; to the values inside if the entries are lists."""
    return list_array(offsets_of(array), fn(array.values)) if is_list(array) else fn(array)


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
