"""Checks of what a manifest says about tensors: sizes, order, and that slices make up wholes.

A file's tensors lie behind each other without gaps, so nothing can claim more memory than its file has bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from raydist.checkpoints.dtypes import stored_dtype
from raydist.checkpoints.tensor_file import FilePlace, TensorFile

__all__ = ["file_places", "require_whole"]

_MOST_DIMENSIONS = 64  # of a torch tensor
_MOST_NUMBERS = 1 << 60  # also where a length of 0 makes it none: strides are products


def file_places(file: str, content: Any, header_bytes: int, num_bytes: int) -> dict[str, FilePlace]:
    """The tensors of a file, from JSON. ValueError where they cannot be."""
    places = {str(key): _place(key, entry) for key, entry in content.items()}
    at = header_bytes
    for key, place in places.items():
        if place.begin != at or place.end < at:
            raise ValueError(f"tensor {key!r:.100} of {file!r} must begin at byte {at}, got {place.begin}")
        at = place.end
    if at != num_bytes:
        raise ValueError(f"the parts of {file!r} make {at} bytes, but it is said to have {num_bytes}")
    return places


def _place(key: Any, entry: Any) -> FilePlace:
    dtype, shape, begin, end, crc, *more = entry
    rows = _lengths(more[0], 2) if more else None
    _lengths([begin, end, crc], 3)
    place = FilePlace(str(dtype), _lengths(shape, _MOST_DIMENSIONS), begin, end, crc, rows)
    if rows is not None and not (place.shape and rows[0] <= rows[1] <= place.shape[0]):
        raise ValueError(f"rows {rows} of tensor {key!r:.100} cannot be: its shape is {place.shape}")
    if math.prod(max(1, length) for length in place.shape) > _MOST_NUMBERS:
        raise ValueError(f"tensor {key!r:.100} is too large: its shape is {place.shape}")
    if end - begin != math.prod(place.slice_shape) * stored_dtype(place.dtype).itemsize:
        raise ValueError(f"tensor {key!r:.100}, {dtype} of shape {place.slice_shape}, cannot be {end - begin} bytes")
    return place


def _lengths(numbers: Any, most: int) -> Any:
    if not isinstance(numbers, list) or len(numbers) > most:
        raise ValueError(f"at most {most} numbers must stand there, got {numbers!r:.100}")
    if any(type(number) is not int or not 0 <= number <= _MOST_NUMBERS for number in numbers):
        raise ValueError(f"numbers from 0 to {_MOST_NUMBERS} must stand there, got {numbers!r:.100}")
    return tuple(numbers)


def require_whole(owner: str, files: Iterable[TensorFile]) -> None:
    """ValueError unless each tensor of an object is there once, as a whole or in slices that make one."""
    found: dict[str, list[FilePlace]] = {}
    for file in files:
        for key, place in file.tensors.items():
            found.setdefault(key, []).append(place)
    for key, places in found.items():
        whole = places[0]
        if any((place.dtype, place.shape) != (whole.dtype, whole.shape) for place in places):
            raise ValueError(f"slices of tensor {key!r:.100} of {owner!r:.100} are of different kinds")
        at = 0
        for start, stop in sorted(place.rows or (0, (*whole.shape, 1)[0]) for place in places):
            if start != at:
                raise ValueError(
                    f"rows {min(start, at)} to {max(start, at)} of tensor {key!r:.100} are there twice or not"
                )
            at = stop
        if at != (*whole.shape, 1)[0]:
            raise ValueError(f"rows of tensor {key!r:.100} of {owner!r:.100} are missing from {at} on")
