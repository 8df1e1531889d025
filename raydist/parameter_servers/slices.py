"""Variables, their slices on parameter servers, and the partitioners that split variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.options.requirement import require


@final
@dataclass(frozen=True, slots=True)
class VariableSpec:
    """A variable to be placed on servers."""

    handle: int  # handle of the variable, the same on the driver and all workers
    name: str  # name of the variable, for messages and for the names of its slices
    shape: tuple[int, ...]  # shape of the variable
    dtype: torch.dtype  # dtype of the variable
    partitioned: bool = True  # True if the variable may be split along dimension 0: parameters may, buffers may not


@final
@dataclass(frozen=True, slots=True)
class PsSlice:
    """Consecutive rows of a variable, stored on one server."""

    number: int  # number of the slice, unique in the strategy
    handle: int  # handle of the variable
    name: str  # name of the variable, with `/part_i` if the variable has several slices
    server: int  # number of the server that has the slice
    begin: int  # first row of the slice in the variable
    shape: tuple[int, ...]  # shape of the slice, `()` for a scalar; only dimension 0 differs from the variable's
    dtype: torch.dtype  # dtype of the variable

    @property
    def num_bytes(self) -> int:
        """Size of the slice's values in bytes."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize

    def within(self, variable: torch.Tensor) -> torch.Tensor:
        """Return the slice's rows as a view of `variable`, which is the whole variable or its gradient."""
        return variable if not self.shape else variable.narrow(0, self.begin, self.shape[0])


VariablePartitioner = Callable[[tuple[int, ...], torch.dtype], Sequence[int]]
"""A function of a variable's shape and dtype that returns the number of parts per dimension: `[k, 1, ...]`."""


@final
@dataclass(frozen=True, slots=True)
class FixedShardsPartitioner:
    """Split every variable into `num_shards` parts along dimension 0, or into single rows if it has fewer rows.

    Args:
        num_shards: Number of parts.

    Raises:
        InvalidArgumentError: `num_shards` is not an int >= 1.

    Source: tf.distribute.experimental.partitioners.FixedShardsPartitioner.

    >>> rd.FixedShardsPartitioner(8)((3, 2), torch.float32)
    [3, 1]
    """

    num_shards: int

    def __post_init__(self) -> None:
        _require_count("num_shards", self.num_shards)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        """Return the number of parts of each dimension."""
        return _along_rows(shape, min(self.num_shards, shape[0]))


@final
@dataclass(frozen=True, slots=True)
class MinSizePartitioner:
    """Split a variable into ceil(size / `min_shard_bytes`) parts, but at most `max_shards`.

    Args:
        min_shard_bytes: Intended size of a part.
        max_shards: Maximum number of parts. The default splits nothing, as in TensorFlow.

    Raises:
        InvalidArgumentError: An argument is not an int >= 1.

    Source: tf.distribute.experimental.partitioners.MinSizePartitioner.

    >>> rd.MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), torch.float32)
    [2, 1]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _require_count("min_shard_bytes", self.min_shard_bytes)
        _require_count("max_shards", self.max_shards)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        """Return the number of parts of each dimension."""
        wanted = math.ceil(math.prod(shape) * dtype.itemsize / self.min_shard_bytes)
        return _along_rows(shape, min(shape[0], self.max_shards, wanted))


@final
@dataclass(frozen=True, slots=True)
class MaxSizePartitioner:
    """Split a variable into the fewest parts of at most `max_shard_bytes`. A part of one row may be larger.

    Args:
        max_shard_bytes: Maximum size of a part.
        max_shards: Maximum number of parts, whatever their size; None: any number.

    Raises:
        InvalidArgumentError: An argument is not an int >= 1.

    Source: tf.distribute.experimental.partitioners.MaxSizePartitioner.

    >>> rd.MaxSizePartitioner(max_shard_bytes=4)((6, 1), torch.float32)
    [6, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _require_count("max_shard_bytes", self.max_shard_bytes)
        if self.max_shards is not None:
            _require_count("max_shards", self.max_shards)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        """Return the number of parts of each dimension."""
        bytes_per_row = math.prod(shape[1:]) * dtype.itemsize
        rows = max(1, self.max_shard_bytes // max(1, bytes_per_row))
        wanted = math.ceil(shape[0] / rows)
        return _along_rows(shape, wanted if self.max_shards is None else min(self.max_shards, wanted))


def _require_count(what: str, value: object) -> None:
    require(_is_count(value), f"{what} must be an int >= 1", value)


def _along_rows(shape: tuple[int, ...], parts: int) -> list[int]:
    return [max(1, parts), *[1] * (len(shape) - 1)]


def plan_slices(
    specs: Sequence[VariableSpec],
    loads: Sequence[int],
    partitioner: VariablePartitioner | None,
    first_number: int,
) -> list[PsSlice]:
    """Assign the rows of new variables to servers.

    Larger variables are assigned first. Each part goes to the server with the fewest parts of the variable so far. Ties
    go to the server with the fewest bytes, then to the first one. A variable that stays whole is one part.

    Args:
        loads: Bytes that each server holds already.
        partitioner: Splits variables; None: every variable stays whole.
        first_number: Number of the first slice; the others follow.

    Returns:
        Slices in the order of the variables, and of the rows within each.
    """
    parts = [_parts_of(spec, partitioner) for spec in specs]
    servers: dict[int, list[int]] = {}
    current_loads = list(loads)
    by_size = sorted(range(len(specs)), key=lambda index: -sum(part.num_bytes for part in parts[index]))
    for index in by_size:
        servers[index] = _assign_servers(parts[index], current_loads)
    planned = [
        replace(part, server=server)
        for index in range(len(specs))
        for part, server in zip(parts[index], servers[index], strict=True)
    ]
    return [replace(part, number=first_number + index) for index, part in enumerate(planned)]


def _assign_servers(parts: Sequence[PsSlice], loads: list[int]) -> list[int]:
    """Return a server for each part, and add the parts' sizes to `loads`."""
    chosen: list[int] = []
    for part in parts:
        num_parts = [chosen.count(server) for server in range(len(loads))]
        server = min(range(len(loads)), key=lambda each: (num_parts[each], loads[each], each))
        chosen.append(server)
        loads[server] += part.num_bytes
    return chosen


def _parts_of(spec: VariableSpec, partitioner: VariablePartitioner | None) -> list[PsSlice]:
    """Return a variable's slices, without servers; if rows do not divide evenly, the first slices have one row more."""
    rows = spec.shape[0] if spec.shape else 0
    count = 1
    if partitioner is not None and spec.partitioned and rows > 1:
        count = min(rows, _num_parts(spec, partitioner(spec.shape, spec.dtype)))
    if count == 1:
        return [PsSlice(-1, spec.handle, spec.name, -1, 0, spec.shape, spec.dtype)]
    rows_per_part, remainder = divmod(rows, count)
    begins = [index * rows_per_part + min(index, remainder) for index in range(count + 1)]
    return [
        PsSlice(-1, spec.handle, f"{spec.name}/part_{index}", -1, begin, (end - begin, *spec.shape[1:]), spec.dtype)
        for index, (begin, end) in enumerate(zip(begins, begins[1:], strict=False))
    ]


def _num_parts(spec: VariableSpec, split: object) -> int:
    """Check the result of a partitioner, and return the number of parts."""
    numbers = list(split) if isinstance(split, Sequence) and not isinstance(split, str | bytes) else None
    is_valid = numbers is not None and len(numbers) == len(spec.shape) and all(_is_count(each) for each in numbers)
    if not is_valid or numbers is None or any(each != 1 for each in numbers[1:]):
        raise InvalidArgumentError(
            f"variable_partitioner must return a list of {len(spec.shape)} ints for {spec.name} of shape {spec.shape}, "
            f"[k, 1, ...] with k >= 1: variables are split along dimension 0 only. Got {split!r}. Return 1 for all "
            "other dimensions."
        )
    return int(numbers[0])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
