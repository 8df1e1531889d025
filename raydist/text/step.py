"""Text steps: the base class, chains, splitting and padding."""

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
    """A step on text, or on the result of another step. Subclasses are frozen dataclasses with an `apply` method.

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
        """Apply the step to Arrow entries. A call converts its argument to Arrow, and the result to numpy.

        Args:
            array: Text (large_string), int64, lists of either, or fixed-size lists.

        Returns:
            An array with one entry of such a kind for each entry of `array`.

        Raises:
            SpecError: The step does not take entries of this kind.

        >>> import pyarrow as pa
        >>> rd.text.Split().apply(pa.array(["a b"], pa.large_string())).to_pylist()
        [['a', 'b']]
        """

    @final
    def __call__(self, values: Any) -> Any:
        """Apply the step to one string, an array (or list) of strings of any shape, or the result of another step.

        Args:
            values: str, UTF-8 bytes, ids, or arrays of these.

        Returns:
            An array of the same shape with one entry for each value: an int64 array for numbers, an object array for
            str and for sequences, which are arrays (`Pad` adds an axis instead). For one string, the entry alone.

        Raises:
            InvalidArgumentError: A string is not valid UTF-8; the message has its row.
            SpecError: The step does not take `values`.
        """
        array, shape = to_arrow(values, fold=self.takes_lists)
        return from_arrow(self.apply(array), shape)


@final
@dataclass(frozen=True)
class Chain(TextStep):
    """A step that applies other steps in order. Faster than separate calls: intermediate results stay in Arrow.

    Attributes:
        steps: The steps, at least one.

    Raises:
        InvalidArgumentError: `steps` is empty, or contains something other than a step.

    >>> encode = rd.text.Chain((rd.text.Split(), rd.text.HashBuckets(1000, first_id=1), rd.text.Pad(3)))
    >>> encode(["cat dog", ""]).tolist()
    [[940, 466, 0], [0, 0, 0]]
    """

    steps: tuple[TextStep, ...]

    def __post_init__(self) -> None:
        if not self.steps or not all(isinstance(step, TextStep) for step in self.steps):
            raise InvalidArgumentError(f"Chain needs a tuple of one step of rd.text or more, got {self.steps!r:.200}.")

    @property
    def takes_lists(self) -> bool:  # type: ignore[override]  # a class constant elsewhere
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
        fold: Turn the last axis of an array without lists into lists.
    """
    if isinstance(values, list) and not values:
        values = np.empty(0, np.int64 if fold else object)  # sequences contain ids
    numpy_array = _to_numpy(values)
    if numpy_array.dtype == object and numpy_array.size and isinstance(numpy_array.flat[0], np.ndarray):
        return _lists(numpy_array), numpy_array.shape
    flat = _flat(numpy_array)
    if not fold:
        return flat, numpy_array.shape
    if numpy_array.ndim == 0:
        raise SpecError(
            f"A sequence is needed, got the single value {values!r:.80}. Give a list, or split the text first."
        )
    length = numpy_array.shape[-1]
    count = numpy_array.size // length if length else int(np.prod(numpy_array.shape[:-1]))
    return list_array(np.arange(count + 1) * length, flat), numpy_array.shape[:-1]


def _to_numpy(values: Any) -> _Array:
    if isinstance(values, str | bytes):
        return object_column([values]).reshape(())
    if isinstance(values, list):
        return object_column(values) if any(isinstance(item, str | bytes) for item in values) else np.array(values)
    return np.asarray(values)


def _flat(numpy_array: _Array) -> pa.Array:
    if numpy_array.dtype.kind in "iu":
        return pa.array(numpy_array.ravel().astype(np.int64))
    if numpy_array.dtype.kind in "OSU":
        return _text(numpy_array.ravel().tolist())
    raise SpecError(f"Text must be str or bytes, and ids integers, got an array of {numpy_array.dtype}.")


def _lists(numpy_array: _Array) -> pa.Array:
    rows = [np.asarray(row) for row in numpy_array.flat]
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
    """Return the error for the first value that is not text."""
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
    """Return the entries of `array` as an array of `shape`; for shape (), the only entry: a str, int64 or array."""
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
    """Apply `fn` to the entries, or to the values of entries that are lists."""
    return list_array(offsets_of(array), fn(array.values)) if is_list(array) else fn(array)


@final
@dataclass(frozen=True)
class Split(TextStep):
    """Split text at white space or at a separator into the same tokens as Python's `str.split`.

    Attributes:
        separator: Text between two tokens; None for any amount of Unicode white space, which gives no empty tokens.

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
        """Return lists of tokens."""
        require_text(array, "Split")
        if self.separator is not None:
            return _as_large(pc.split_pattern(array, self.separator))
        trimmed = pc.utf8_trim_whitespace(array)
        lists = pc.utf8_split_whitespace(trimmed)
        # For text of white space alone, Arrow returns one empty token, and Python none.
        offsets, empty = offsets_of(lists), pc.binary_length(trimmed).to_numpy() == 0
        if not empty.any():
            return list_array(offsets, lists.values)
        kept = np.ones(len(lists.values), bool)
        kept[offsets[:-1][empty]] = False
        return list_array(offsets - np.append(0, np.cumsum(empty)), lists.values.filter(pa.array(kept)))


@final
@dataclass(frozen=True)
class Characters(TextStep):
    """Split text into Unicode code points, as `list(text)` does.

    Source: tf.strings.unicode_split.

    >>> rd.text.Characters()("né").tolist()
    ['n', 'é']
    """

    def apply(self, array: pa.Array) -> pa.Array:
        """Return lists of strings of one code point."""
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
    """Raise SpecError unless the entries are text."""
    if not pa.types.is_large_string(array.type):
        raise SpecError(f"{what} takes text, got {array.type}. It must come before the steps that make ids or tokens.")


def _as_large(lists: pa.Array) -> pa.Array:
    return list_array(offsets_of(lists), lists.values)


@final
@dataclass(frozen=True)
class Pad(TextStep):
    """Cut every sequence of ids at `length`, or pad it with `pad_id`: the result is int64 of shape (..., length).

    Attributes:
        length: Number of ids in every result, >= 1.
        pad_id: Id that is appended to shorter sequences.

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
        """Return fixed-size lists."""
        if not is_list(array) or not pa.types.is_int64(array.type.value_type):
            raise SpecError(
                f"Pad takes sequences of ids, got {array.type}. Make tokens into ids before, by a Vocabulary or "
                "HashBuckets."
            )
        offsets = offsets_of(array)
        positions = np.arange(self.length)
        filled = positions < np.diff(offsets)[:, np.newaxis]
        padded = np.full(filled.shape, self.pad_id, np.int64)
        padded[filled] = array.values.to_numpy()[(offsets[:-1, np.newaxis] + positions)[filled]]
        return pa.FixedSizeListArray.from_arrays(pa.array(padded.ravel()), self.length)
