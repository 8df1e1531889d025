"""Storage of the variable slices on one parameter server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.core.machine import free_memory
from raydist.parameter_servers.slices import PsSlice


@final
class PsSlices:
    """The slices of one parameter server and their values. Not thread-safe.

    Args:
        server: Number of the server, for error messages.
        free_bytes: Function that returns the number of free bytes of memory, or None if the number is unknown.
    """

    def __init__(self, server: int, free_bytes: Callable[[], int | None] = free_memory) -> None:
        self.version = 0  # number of times that the values have changed
        self._server = server
        self._free_bytes = free_bytes
        self._slices: dict[int, PsSlice] = {}
        self._values: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all values in bytes."""
        return sum(each.num_bytes for each in self._slices.values())

    def slice(self, number: int) -> PsSlice:
        """Return the description of a slice."""
        if number not in self._slices:
            raise InvalidArgumentError(
                f"A slice must be created before it is used, but parameter server {self._server} has "
                f"{len(self._slices)} slices and not number {number}. Use the server that holds this slice."
            )
        return self._slices[number]

    def value(self, number: int) -> torch.Tensor:
        """Return the values of a slice. Write to them only within `changing`."""
        self.slice(number)
        return self._values[number]

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Count all changes in the `with` block as one version, also if the block fails after some changes."""
        try:
            with torch.no_grad():
                yield
        finally:
            self.version += 1

    def create(self, slices: Sequence[PsSlice], values: Sequence[torch.Tensor]) -> None:
        """Create slices. Overwrite slices whose numbers exist already."""
        for each, value in zip(slices, values, strict=True):
            self._require_same_layout(each, value)
        fresh = {each.number: each for each in slices if each.number not in self._slices}
        self._require_memory(sum(each.num_bytes for each in fresh.values()))
        self._slices |= fresh
        self._values |= {number: torch.empty(each.shape, dtype=each.dtype) for number, each in fresh.items()}
        with self.changing():
            for each, value in zip(slices, values, strict=True):
                self._values[each.number].copy_(value)

    def replace(self, values: Mapping[int, torch.Tensor]) -> None:
        """Replace values by slice number."""
        for number, value in values.items():
            self._require_same_layout(self.slice(number), value)
        with self.changing():
            for number, value in values.items():
                self._values[number].copy_(value)

    def drop(self, numbers: Iterable[int]) -> None:
        """Delete slices. Ignore numbers that do not exist."""
        known = [number for number in numbers if number in self._slices]
        if known:
            with self.changing():
                for number in known:
                    del self._slices[number], self._values[number]

    def _require_same_layout(self, expected: PsSlice, value: torch.Tensor) -> None:
        if tuple(value.shape) != expected.shape or value.dtype != expected.dtype:
            raise InvalidArgumentError(
                f"Values of {expected.name} must be {expected.dtype} of shape {expected.shape}, got {value.dtype} of "
                f"shape {tuple(value.shape)}. Pass the rows of this slice only."
            )
        known = self._slices.get(expected.number)
        if known is not None and (known.shape, known.dtype) != (expected.shape, expected.dtype):
            raise InvalidArgumentError(
                f"The layout of a slice must not change, but slice {expected.number} was created for {known.name} as "
                f"{known.dtype} of shape {known.shape}, got {expected.dtype} of shape {expected.shape} for "
                f"{expected.name}. Use a new number."
            )

    def _require_memory(self, needed: int) -> None:
        free = self._free_bytes()
        if free is not None and needed > free:
            raise InvalidArgumentError(
                f"Variables must fit into the memory of their servers, but parameter server {self._server} needs "
                f"{needed:,} bytes more and has {free:,} free: {needed - free:,} too few. Use more servers (num_ps, on "
                "other machines), give them more memory, or use a partitioner that splits large variables."
            )
