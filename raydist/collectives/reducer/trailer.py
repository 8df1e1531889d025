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
from raydist.collectives.translation import describe_odd_ones
from raydist.errors import CollectiveMismatchError

__all__ = ["BACKWARD_ADVICE", "PassStamp", "ReceivedTrailer", "Trailer", "Updates", "agree", "mismatch"]

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
    """Parameter updates that a rank has made so far.

    Attributes:
        count: Number of optimizer steps.
        rates: Learning rates of the optimizers.
    """

    count: int = 0
    rates: tuple[float, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class PassStamp:
    """Identification of a backward pass, which must be the same on all ranks.

    Attributes:
        step: Number of the step.
        backward: Number of the pass in the step.
        adds_up: Gradients are summed without weights.
        updates: Parameter updates that the rank has made before the pass.
        calls: Digest of the user collectives that the rank has called before the pass.
    """

    step: int
    backward: int
    adds_up: bool = False
    updates: Updates = Updates()
    calls: int = 0

    def encode(self) -> bytes:
        return _NUMBERS.pack(
            self.step % (1 << 32),
            self.backward % (1 << 16),
            self.updates.count % (1 << 32),
            *_summary(self.updates.rates),
            self.calls,
            self.adds_up,
        )


@final
class ReceivedTrailer:
    """The reduced trailer of one pass, with the sections of all ranks.

    Args:
        stamps: Encoded `PassStamp` of each rank.
        complete: Every rank had a dense gradient for every parameter.
        checksums_differ: Ranks have changed gradients differently since the last pass.
        flags: The number of ranks with a gradient for each parameter, in the order of the layout, then the number of
            ranks with a sparse gradient for each.
    """

    def __init__(self, stamps: Sequence[bytes], *, complete: bool, checksums_differ: bool, flags: torch.Tensor) -> None:
        self.complete, self.checksums_differ = complete, checksums_differ
        self._stamps, self._flags = stamps, flags

    def check(self) -> None:
        """Raise CollectiveMismatchError unless all ranks were in the same pass."""
        if len(set(self._stamps)) > 1:
            raise _parted([_NUMBERS.unpack(stamp) for stamp in self._stamps])

    def flags(self) -> tuple[list[bool], list[bool]]:
        """Return two flags per parameter: any rank has a gradient, any rank has a sparse gradient."""
        flags = [number != 0 for number in self._flags.tolist()]
        return flags[: len(flags) // 2], flags[len(flags) // 2 :]


@final
class Trailer:
    """The end of the last bucket: a section for each rank, then two flags for each parameter.

    Args:
        memory: The `size(...)` elements behind the gradients.
        num_parameters: Number of parameters in all buckets.
        rank: Number of this rank.
        world_size: Number of ranks.
    """

    def __init__(self, memory: torch.Tensor, num_parameters: int, *, rank: int, world_size: int) -> None:
        self.memory = memory
        self._own = slice(_SECTION * rank, _SECTION * (rank + 1))
        self._head = _SECTION * world_size
        self._world_size = world_size
        self._if_all_agree = b""
        self._blank = np.zeros(self.size(num_parameters, world_size), np.uint8)
        self._blank[self._head : self._head + num_parameters] = 1
        shown = memory.device.type == "cpu" and memory.dtype in (torch.float32, torch.float64, torch.float16)
        self._shown = memory.numpy() if shown else None  # numpy writes a few elements ten times faster than torch

    @staticmethod
    def size(num_parameters: int, world_size: int) -> int:
        """Return the number of elements of a trailer."""
        return _SECTION * world_size + 2 * num_parameters

    def write(
        self,
        stamp: bytes,
        *,
        lacking: tuple[Sequence[bool], Sequence[bool]] | None = None,
        checksum: torch.Tensor | None = None,
    ) -> None:
        """Write this rank's section. Does not block.

        Args:
            stamp: Encoded `PassStamp`.
            lacking: Two flags per parameter: this rank has a gradient, has a sparse gradient. None where this rank has
                a dense gradient for every parameter.
            checksum: Checksum of gradients that the program has changed since the last pass, one float64 on the
                trailer's device; None for none.
        """
        section = stamp + bytes(_CHECKSUM_BYTES) + bytes((lacking is not None,))
        numbers = self._blank
        if lacking is not None:
            numbers = self._blank.copy()
            numbers[self._head :] = [*lacking[0], *lacking[1]]
        if self._shown is not None:
            self._shown[:] = numbers
            self._shown[self._own] = np.frombuffer(section, np.uint8)
        else:
            numbers = numbers.copy()
            numbers[self._own] = np.frombuffer(section, np.uint8)
            values = torch.from_numpy(numbers).to(self.memory.dtype)
            if self.memory.is_cuda:
                values = values.pin_memory()
            self.memory.copy_(values, non_blocking=True)
        self._if_all_agree = b"" if lacking is not None or checksum is not None else section * self._world_size
        if self._shown is not None and self._if_all_agree:
            self._if_all_agree = self._shown[self._own].tobytes() * self._world_size
        if checksum is not None:
            place = self.memory[self._own][_NUMBERS.size : _INCOMPLETE]
            place.copy_(checksum.view(1).view(torch.uint8))

    def received(self, host: torch.Tensor) -> ReceivedTrailer:
        """Decode the reduced trailer from `host`, a copy of it in host memory."""
        if self._shown is not None and host.numpy()[: self._head].tobytes() == self._if_all_agree:
            return ReceivedTrailer((), complete=True, checksums_differ=False, flags=host[self._head :])
        values = host.real if host.is_complex() else host
        head = values[: self._head].to(torch.uint8).numpy().tobytes()
        flags = values[self._head :]
        if head == self._if_all_agree:
            return ReceivedTrailer((), complete=True, checksums_differ=False, flags=flags)
        sections = [head[start : start + _SECTION] for start in range(0, len(head), _SECTION)]
        return ReceivedTrailer(
            [section[: _NUMBERS.size] for section in sections],
            complete=not any(section[_INCOMPLETE] for section in sections),
            checksums_differ=len({section[_NUMBERS.size : _INCOMPLETE] for section in sections}) > 1,
            flags=flags,
        )


def _parted(stamps: Sequence[tuple[int, int, int, float, int, int, bool]]) -> CollectiveMismatchError:
    """Return the error for ranks with different stamps."""
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
    """Check that all ranks pass the same numbers.

    Args:
        communicator: Communicator of the ranks.
        what: Subject of the comparison, for messages.
        numbers: Numbers of this rank, by name.
        advice: Remedy for a mismatch, for messages.

    Blocking: until all ranks call it, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: The numbers differ. All ranks raise it, with the numbers of every rank.
    """
    rows = [json.loads(row) for row in communicator.exchange_on_host(json.dumps(dict(numbers)).encode(), what)]
    if any(row != rows[0] for row in rows):
        raise mismatch(what, rows, advice)


def mismatch(what: str, said: Sequence[Mapping[str, Hashable]], advice: str) -> CollectiveMismatchError:
    """Return the error for ranks that disagree on `what`; `said` holds the values of each rank.

    >>> mismatch("the time", [{"hour": 3}, {"hour": 4}], "Ask one clock.").message
    'All ranks must agree on the time, got rank 0: hour 3; rank 1: hour 4. Ask one clock.'
    """
    shown = (", ".join(f"{name} {value}" for name, value in held.items()) for held in said)
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(shown))
    listed += describe_odd_ones({rank: tuple(held.items()) for rank, held in enumerate(said)})
    return CollectiveMismatchError(f"All ranks must agree on {what}, got {listed}. {advice}")
