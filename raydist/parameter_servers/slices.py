"""Variables, their slices on parameter servers, and the partitioners that cut them."""

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
    partitioned: bool = True  # True to allow a split along dimension 0: parameters may be split, buffers stay whole


@final
@dataclass(frozen=True, slots=True)
class PsSlice:
    """Consecutive rows of a variable, all of which lie on one server."""

    number: int  # number of the slice, unique in the strategy
    handle: int  # handle of the variable
    name: str  # name of the variable, with `/part_i` if the variable has several slices
    server: int  # number of the server that has the slice
    begin: int  # first row of the slice in the variable
    shape: tuple[int, ...]  # shape of the slice: as the variable's but for dimension 0; `()` for a scalar
    dtype: torch.dtype  # dtype of the variable

    @property
    def num_bytes(self) -> int:
        """Size of the slice's values in bytes."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize

    def within(self, variable: torch.Tensor) -> torch.Tensor:
        """Return the slice's view of its whole variable (or of the variable's gradient)."""
        return variable if not self.shape else variable.narrow(0, self.begin, self.shape[0])


VariablePartitioner = Callable[[tuple[int, ...], torch.dtype], Sequence[int]]
"""Given a variable's shape and dtype, returns the number of parts of each dimension: `[k, 1, ...]`."""


@final
@dataclass(frozen=True, slots=True)
class FixedShardsPartitioner:
    """Split every variable into `num_shards` parts along dimension 0, or into its rows if it has fewer.

    Args:
        num_shards: Number of parts.

    Raises:
        InvalidArgumentError: `num_shards` is no int >= 1.

    Source: tf.distribute.experimental.partitioners.FixedShardsPartitioner.

    >>> rd.FixedShardsPartitioner(8)((3, 2), torch.float32)
    [3, 1]
    """

    num_shards: int

    def __post_init__(self) -> None:
        _require_count("num_shards", self.num_shards)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        """Return the number of parts of each dimension of such a variable."""
        return _along_rows(shape, min(self.num_shards, shape[0]))


@final
@dataclass(frozen=True, slots=True)
class MinSizePartitioner:
    """Split a variable into (size / `min_shard_bytes`) parts, rounded up, but not more than `max_shards`.

    Args:
        min_shard_bytes: Intended size of a part.
        max_shards: Maximum number of parts. The default splits nothing, as TensorFlow's does.

    Raises:
        InvalidArgumentError: An argument is no int >= 1.

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
        """Return the number of parts of each dimension of such a variable."""
        wanted = math.ceil(math.prod(shape) * dtype.itemsize / self.min_shard_bytes)
        return _along_rows(shape, min(shape[0], self.max_shards, wanted))


@final
@dataclass(frozen=True, slots=True)
class MaxSizePartitioner:
    """Split a variable into as few parts as possible of at most `max_shard_bytes` (a larger single row aside).

    Args:
        max_shard_bytes: Maximum size of a part.
        max_shards: Maximum number of parts, whatever their size; None: any number.

    Raises:
        InvalidArgumentError: An argument is no int >= 1.

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
        """Return the number of parts of each dimension of such a variable."""
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

    Larger variables come first. Each part goes to a server with the fewest parts of its variable so far; of these, to
    the one with the fewest bytes, or the first of several. A variable that stays whole is one part.

    Args:
        loads: Bytes that each server holds already.
        partitioner: Splits variables; None: every variable stays whole.
        first_number: Number of the first slice; the others follow.

    Returns:
        Slices in the order of the variables, and of the rows within each.
    """
    parts = [_parts_of(spec, partitioner) for spec in specs]
    servers: dict[int, list[int]] = {}
    taken = list(loads)
    by_size = sorted(range(len(specs)), key=lambda index: -sum(part.num_bytes for part in parts[index]))
    for index in by_size:
        servers[index] = _deal(parts[index], taken)
    planned = [
        replace(part, server=server)
        for index in range(len(specs))
        for part, server in zip(parts[index], servers[index], strict=True)
    ]
    return [replace(part, number=first_number + index) for index, part in enumerate(planned)]


def _deal(parts: Sequence[PsSlice], taken: list[int]) -> list[int]:
    """Return a server for each part, and add the parts' sizes to `taken`."""
    dealt: list[int] = []
    for part in parts:
        have = [dealt.count(server) for server in range(len(taken))]
        server = min(range(len(taken)), key=lambda each: (have[each], taken[each], each))
        dealt.append(server)
        taken[server] += part.num_bytes
    return dealt


def _parts_of(spec: VariableSpec, partitioner: VariablePartitioner | None) -> list[PsSlice]:
    """Return a variable's slices, without servers; if rows do not divide evenly, the first slices have one row more."""
    rows = spec.shape[0] if spec.shape else 0
    count = 1
    if partitioner is not None and spec.partitioned and rows > 1:
        count = min(rows, _count_of(spec, partitioner(spec.shape, spec.dtype)))
    if count == 1:
        return [PsSlice(-1, spec.handle, spec.name, -1, 0, spec.shape, spec.dtype)]
    fewest, more = divmod(rows, count)
    begins = [index * fewest + min(index, more) for index in range(count + 1)]
    return [
        PsSlice(-1, spec.handle, f"{spec.name}/part_{index}", -1, begin, (end - begin, *spec.shape[1:]), spec.dtype)
        for index, (begin, end) in enumerate(zip(begins, begins[1:], strict=False))
    ]


def _count_of(spec: VariableSpec, split: object) -> int:
    """Return the number of parts that a partitioner wants, after checking its result."""
    numbers = list(split) if isinstance(split, Sequence) and not isinstance(split, str | bytes) else None
    sound = numbers is not None and len(numbers) == len(spec.shape) and all(_is_count(each) for each in numbers)
    if not sound or numbers is None or any(each != 1 for each in numbers[1:]):
        raise InvalidArgumentError(
            f"variable_partitioner must return a list of {len(spec.shape)} ints for {spec.name} of shape {spec.shape}, "
            f"[k, 1, ...] with k >= 1: variables are split along dimension 0 only. Got {split!r}. Return 1 for all "
            "other dimensions."
        )
    return int(numbers[0])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
