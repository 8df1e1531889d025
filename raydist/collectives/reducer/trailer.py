"""The trailer of a backward pass: a few numbers of each rank that are reduced together with the last bucket.

Each rank fills a section of its own and leaves the others zero, so that their sum is an all-gather. Every rank learns
which step and backward pass the others are in, and which gradients they lack, without a further collective. Numbers are
stored one byte an element: every dtype of a gradient holds these exactly (bfloat16: whole numbers up to 256).
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

# Step, backward pass, optimizer steps (modulo 2**32), mean learning rate, digest of all rates, digest of the calls of
# user collectives, and whether gradients are added up.
_NUMBERS = struct.Struct(">IHIfII?")
_CHECKSUM_BYTES = 8
_INCOMPLETE = _NUMBERS.size + _CHECKSUM_BYTES
_SECTION = _INCOMPLETE + 1


@final
@dataclass(frozen=True, slots=True)
class Updates:
    """The updates of parameters that a rank has made so far.

    Attributes:
        count: Steps of its optimizers.
        rates: Their learning rates.
    """

    count: int = 0
    rates: tuple[float, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class PassStamp:
    """The backward pass that a rank is in. It must be the same on all ranks.

    Attributes:
        step: Number of its step.
        backward: Number of the pass in its step.
        adds_up: Gradients are added up, not weighted.
        updates: The updates that it has made before.
        calls: A digest of the user collectives that it has called before.
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
    """The trailer of one pass as all ranks have filled it in.

    Args:
        stamps: Of each rank, encoded.
        complete: Every rank had every gradient, and all of them dense.
        checksums_differ: Ranks have changed gradients differently since the pass before.
        flags: By parameter, in the order of the layout: how many ranks had a gradient; then how many a sparse one.
    """

    def __init__(self, stamps: Sequence[bytes], *, complete: bool, checksums_differ: bool, flags: torch.Tensor) -> None:
        self.complete, self.checksums_differ = complete, checksums_differ
        self._stamps, self._flags = stamps, flags

    def check(self) -> None:
        """Raise CollectiveMismatchError unless all ranks were in the same pass."""
        if len(set(self._stamps)) > 1:
            raise _parted([_NUMBERS.unpack(stamp) for stamp in self._stamps])

    def flags(self) -> tuple[list[bool], list[bool]]:
        """Return whether any rank has a gradient, and whether any has a sparse one, by parameter."""
        flags = [number != 0 for number in self._flags.tolist()]
        return flags[: len(flags) // 2], flags[len(flags) // 2 :]


@final
class Trailer:
    """The end of the last bucket: a section for each rank, then two flags for each parameter.

    Args:
        memory: The elements behind the gradients, `size(...)` of them.
        num_parameters: Parameters in all buckets.
        rank: This rank.
        world_size: All ranks.
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
        self._shown = memory.numpy() if shown else None  # numpy writes a few elements in a tenth of torch's time

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
        """Fill in this rank's section. Does not block.

        Args:
            stamp: A `PassStamp`, encoded.
            lacking: By parameter, whether this rank has a gradient and whether that is sparse; None where it has all of
                them and all are dense.
            checksum: One float64 on the trailer's device, of gradients that the program has changed since the pass
                before; None for none.
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
        """Return the reduced trailer, of which `host` is a copy on the host."""
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
    """The error of ranks with different stamps."""
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
    """Return the mean of learning rates and a digest of all."""
    return sum(rates) / len(rates) if rates else 0.0, zlib.crc32(struct.pack(f"{len(rates)}d", *rates))


def agree(communicator: Communicator, what: str, numbers: Mapping[str, int], advice: str) -> None:
    """Return if all ranks hold the same numbers.

    Args:
        communicator: Carries them.
        what: What is agreed on, for messages.
        numbers: By name.
        advice: What the message says is to be done.

    Blocking: until all ranks call it, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: On every rank alike, with every rank's numbers.
    """
    rows = [json.loads(row) for row in communicator.exchange_on_host(json.dumps(dict(numbers)).encode(), what)]
    if any(row != rows[0] for row in rows):
        raise mismatch(what, rows, advice)


def mismatch(what: str, said: Sequence[Mapping[str, Hashable]], advice: str) -> CollectiveMismatchError:
    """Return the error of ranks that disagree on `what`; `said` is what each of them holds.

    >>> mismatch("the time", [{"hour": 3}, {"hour": 4}], "Ask one clock.").message
    'All ranks must agree on the time, got rank 0: hour 3; rank 1: hour 4. Ask one clock.'
    """
    shown = (", ".join(f"{name} {value}" for name, value in held.items()) for held in said)
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(shown))
    listed += describe_odd_ones({rank: tuple(held.items()) for rank, held in enumerate(said)})
    return CollectiveMismatchError(f"All ranks must agree on {what}, got {listed}. {advice}")
