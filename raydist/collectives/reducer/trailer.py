"""The trailer of a backward pass: a few numbers of each rank that are reduced together with the last bucket.

Each rank writes its own section and leaves the other sections zero, so that the sum is an all-gather. Every rank learns
which step and backward pass the other ranks are in, and which gradients they lack, without a further collective. Each
element holds one byte, which every gradient dtype represents exactly (bfloat16: whole numbers up to 256).
"""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from raydist.collectives.base import Communicator
from raydist.collectives.translation import describe_each
from raydist.core.errors import CollectiveMismatchError

BACKWARD_ADVICE = "Let all replicas call backward as often, on a loss that reaches the same parameters."

# Step, backward pass, optimizer steps (modulo 2**32), mean learning rate, digest of all rates, digest of the user
# collectives, and True for the op SUM.
_NUMBERS = struct.Struct(">IHIfII?")
_CHECKSUM_BYTES = 8
_INCOMPLETE = _NUMBERS.size + _CHECKSUM_BYTES
_SECTION = _INCOMPLETE + 1


@final
@dataclass(frozen=True, slots=True)
class Updates:
    """Parameter updates that a rank has made so far."""

    count: int = 0  # number of optimizer steps
    rates: tuple[float, ...] = ()  # learning rates of the optimizers


def encode_stamp(
    step: int, backward: int, *, adds_up: bool = False, updates: Updates = Updates(), calls: int = 0
) -> bytes:
    """Encode the identification of backward pass `backward` of a step, which must be the same on all ranks.

    It contains the reduction (`adds_up`: without weights), the parameter updates, and a digest of the user collectives
    before the pass.
    """
    count, rates = updates.count % (1 << 32), _summary(updates.rates)
    return _NUMBERS.pack(step % (1 << 32), backward % (1 << 16), count, *rates, calls, adds_up)


@final
@dataclass(frozen=True, slots=True)
class ReceivedTrailer:
    """The reduced trailer of one pass, with the sections of all ranks."""

    stamps: Sequence[bytes]  # stamp of each rank, see `encode_stamp`
    checksums_differ: bool  # ranks have changed gradients differently since the last pass
    # for each parameter, in the order of the layout, True if any rank has a gradient; None if every rank has a new
    # gradient for every parameter
    present: Sequence[bool] | None

    def check(self) -> None:
        """Raise CollectiveMismatchError unless all ranks were in the same pass."""
        if len(set(self.stamps)) > 1:
            raise _parted([_NUMBERS.unpack(stamp) for stamp in self.stamps])


@final
class Trailer:
    """The end of the last bucket: a section for each rank, then a flag for each parameter.

    Args:
        memory: The `size(...)` elements behind the gradients.
    """

    def __init__(self, memory: torch.Tensor, num_parameters: int, rank: int, world_size: int) -> None:
        self.memory = memory
        self._own = slice(_SECTION * rank, _SECTION * (rank + 1))
        self._head = _SECTION * world_size
        self._blank = np.zeros(self.size(num_parameters, world_size), np.uint8)
        self._blank[self._head :] = 1

    @staticmethod
    def size(num_parameters: int, world_size: int) -> int:
        """Return the number of elements of a trailer."""
        return _SECTION * world_size + num_parameters

    def write(
        self, stamp: bytes, *, present: Sequence[bool] | None = None, checksum: torch.Tensor | None = None
    ) -> None:
        """Write this rank's section. Does not block.

        Args:
            stamp: See `encode_stamp`.
            present: For each parameter, True if this rank has a gradient; None if it has a new one for all.
            checksum: See `known_gradients.combined`.
        """
        numbers = self._blank.copy()
        section = stamp + bytes(_CHECKSUM_BYTES) + bytes((present is not None,))
        numbers[self._own] = np.frombuffer(section, np.uint8)
        if present is not None:
            numbers[self._head :] = present
        values = torch.from_numpy(numbers).to(self.memory.dtype)
        if self.memory.is_cuda:
            values = values.pin_memory()
        self.memory.copy_(values, non_blocking=True)
        if checksum is not None:
            place = self.memory[self._own][_NUMBERS.size : _INCOMPLETE]
            place.copy_(checksum.view(1).view(torch.uint8))

    def received(self, host: torch.Tensor) -> ReceivedTrailer:
        """Decode the reduced trailer from `host`, a copy of it in host memory."""
        values = host.real if host.is_complex() else host
        head = values[: self._head].to(torch.uint8).numpy().tobytes()
        sections = [head[start : start + _SECTION] for start in range(0, len(head), _SECTION)]
        lacking = any(section[_INCOMPLETE] for section in sections)
        return ReceivedTrailer(
            [section[: _NUMBERS.size] for section in sections],
            checksums_differ=len({section[_NUMBERS.size : _INCOMPLETE] for section in sections}) > 1,
            present=(values[self._head :] != 0).tolist() if lacking else None,
        )


def _parted(stamps: Sequence[tuple[int, int, int, float, int, int, bool]]) -> CollectiveMismatchError:
    places: list[dict[str, Hashable]] = [
        {"step": step, "backward pass": backward, "op": "SUM" if adds_up else "MEAN"}
        for step, backward, *_, adds_up in stamps
    ]
    if any(place != places[0] for place in places):
        return mismatch("the backward pass", places, BACKWARD_ADVICE)
    if len({stamp[2:5] for stamp in stamps}) == 1:
        return CollectiveMismatchError(
            f"All replicas must call the same collectives in the same order, but before backward pass "
            f"{stamps[0][1]} of step {stamps[0][0]} they have called different ones, got digests "
            f"{', '.join(f'{stamp[5]:08x}' for stamp in stamps)}. Look for a branch that only some replicas take."
        )
    step = f"the updates made before step {stamps[0][0]} (an optimizer step, or a learning rate, on some ranks only)"
    advice = "Let all replicas step their optimizers alike, and set the same learning rates."
    said: list[dict[str, Hashable]] = [
        {"optimizer steps": count, "mean learning rate": f"{rate:.7g} (digest of all: {digest:08x})"}
        for _, _, count, rate, digest, *_ in stamps
    ]
    return mismatch(step, said, advice)


@functools.lru_cache(maxsize=64)
def _summary(rates: tuple[float, ...]) -> tuple[float, int]:
    """Return the mean and a digest of the learning rates."""
    return sum(rates) / len(rates) if rates else 0.0, zlib.crc32(struct.pack(f"{len(rates)}d", *rates))


def agree(communicator: Communicator, what: str, numbers: Mapping[str, int], advice: str) -> None:
    """Check that all ranks pass the same numbers, given by name. Blocks until all ranks call it.

    Raises:
        CollectiveMismatchError: The numbers differ. All ranks raise it, with the numbers of every rank and the advice.
    """
    rows = [json.loads(row) for row in communicator.exchange_on_host(json.dumps(dict(numbers)).encode(), what)]
    if any(row != rows[0] for row in rows):
        raise mismatch(what, rows, advice)


def mismatch(what: str, said: Sequence[Mapping[str, Hashable]], advice: str) -> CollectiveMismatchError:
    """Return the error for ranks that disagree on `what`; `said` holds the values of each rank.

    >>> mismatch("the time", [{"hour": 3}, {"hour": 4}], "Ask one clock.").message
    'All ranks must agree on the time, got rank 0: hour 3; rank 1: hour 4. Ask one clock.'
    """
    shown = [", ".join(f"{name} {value}" for name, value in held.items()) for held in said]
    return CollectiveMismatchError(f"All ranks must agree on {what}, got {describe_each(shown)}. {advice}")
