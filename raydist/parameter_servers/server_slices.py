"""The values of a server's slices."""

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
    """All slices of one server, for one thread at a time.

    Args:
        room: Returns the number of bytes that are left; None: unknown.
    """

    def __init__(self, server: int, room: Callable[[], int | None] = free_memory) -> None:
        self.version = 0  # number of changes of the values so far
        self._server = server
        self._room = room
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
                f"Slices must be created before they are asked for, but parameter server {self._server} has "
                f"{len(self._slices)} of them and not number {number}. Ask the server that was planned for it."
            )
        return self._slices[number]

    def value(self, number: int) -> torch.Tensor:
        """Return a slice's values. They are written only within `changing`."""
        self.slice(number)
        return self._values[number]

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Make one version of all changes in the block; a block that fails may have changed values, too."""
        try:
            with torch.no_grad():
                yield
        finally:
            self.version += 1

    def create(self, slices: Sequence[PsSlice], values: Sequence[torch.Tensor]) -> None:
        """Create slices; slices with known numbers are overwritten."""
        for each, value in zip(slices, values, strict=True):
            self._require_fitting(each, value)
        fresh = {each.number: each for each in slices if each.number not in self._slices}
        self._require_room(sum(each.num_bytes for each in fresh.values()))
        self._slices |= fresh
        self._values |= {number: torch.empty(each.shape, dtype=each.dtype) for number, each in fresh.items()}
        with self.changing():
            for each, value in zip(slices, values, strict=True):
                self._values[each.number].copy_(value)

    def replace(self, values: Mapping[int, torch.Tensor]) -> None:
        """Replace values by slice number."""
        for number, value in values.items():
            self._require_fitting(self.slice(number), value)
        with self.changing():
            for number, value in values.items():
                self._values[number].copy_(value)

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop slices; unknown ones are ignored."""
        known = [number for number in numbers if number in self._slices]
        if known:
            with self.changing():
                for number in known:
                    del self._slices[number], self._values[number]

    def _require_fitting(self, wanted: PsSlice, value: torch.Tensor) -> None:
        if tuple(value.shape) != wanted.shape or value.dtype != wanted.dtype:
            raise InvalidArgumentError(
                f"Values of {wanted.name} must be {wanted.dtype} of shape {wanted.shape}, got {value.dtype} of shape "
                f"{tuple(value.shape)}. Give the slice's own rows."
            )
        known = self._slices.get(wanted.number)
        if known is not None and (known.shape, known.dtype) != (wanted.shape, wanted.dtype):
            raise InvalidArgumentError(
                f"Slice {wanted.number} must stay {known.dtype} of shape {known.shape}, as it was created for "
                f"{known.name}, got {wanted.dtype} of shape {wanted.shape} for {wanted.name}. Use a new number."
            )

    def _require_room(self, needed: int) -> None:
        room = self._room()
        if room is not None and needed > room:
            raise InvalidArgumentError(
                f"Variables must fit into the memory of their servers, but parameter server {self._server} is to hold "
                f"{needed:,} bytes more and has {room:,} free: {needed - room:,} too few. Use more servers (num_ps, on "
                "other machines), give them more memory, or use a partitioner that splits large variables."
            )
