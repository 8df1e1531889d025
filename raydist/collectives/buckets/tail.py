"""What travels behind the gradients of a bucket, in the same all-reduce: who sends it, and what its sender lacks.

A sum in which each rank fills a place of its own and leaves the others zero is an all-gather. So every rank learns
which step and backward pass each other one is in, without a round trip for it. Numbers travel as bytes, since every
dtype of a gradient holds those exactly (bfloat16: whole numbers up to 256).
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from raydist.collectives.buckets.agreement import BACKWARD_ADVICE, mismatch
from raydist.errors import CollectiveMismatchError

__all__ = ["BucketTail", "PassStamp", "Updates"]

# Step, backward pass, optimizer steps (modulo 2**32), mean learning rate, digest of all; then two truth values.
_NUMBERS = struct.Struct(">IHIfI")
_STAMP_BYTES = _NUMBERS.size + 2
# Behind the stamp: whether its rank's details must be read, and whether gradients came too late for their bucket.
_INCOMPLETE, _LATE = _STAMP_BYTES, _STAMP_BYTES + 1
_SECTION = _STAMP_BYTES + 2


@final
@dataclass(frozen=True, slots=True)
class Updates:
    """What a rank has done with the gradients of before.

    Attributes:
        count: Steps of its optimizers.
        rates: Their learning rates.
    """

    count: int = 0
    rates: tuple[float, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class PassStamp:
    """Which backward pass a rank is in.

    Attributes:
        step: Number of its step.
        backward: Number of the pass in its step.
        adds_up: Gradients are added up, not weighted.
        relayout: No gradients follow: this rank trains other parameters than before.
        updates: What became of earlier gradients.
    """

    step: int
    backward: int
    adds_up: bool = False
    relayout: bool = False
    updates: Updates = Updates()

    def encode(self) -> bytes:
        numbers = _NUMBERS.pack(
            self.step % (1 << 32),
            self.backward % (1 << 16),
            self.updates.count % (1 << 32),
            *_summary(self.updates.rates),
        )
        return numbers + bytes((self.adds_up, self.relayout))

    @staticmethod
    def place_of(encoded: bytes) -> dict[str, Hashable]:
        """Where a rank is in its program, by what it has encoded; for messages."""
        step, backward, _, _, _ = _NUMBERS.unpack(encoded[:-2])
        adds_up, relayout = encoded[-2:]
        layout = {"layout of trained parameters": "changes"} if relayout else {}
        return {"step": step, "backward pass": backward, "op": "SUM" if adds_up else "MEAN", **layout}

    @staticmethod
    def updates_of(encoded: bytes) -> dict[str, Hashable]:
        """What a rank has done before, by what it has encoded; for messages."""
        _, _, count, rate, digest = _NUMBERS.unpack(encoded[:-2])
        return {"optimizer steps": count, "mean learning rate": f"{rate:.7g} (digest of all: {digest:08x})"}


@final
class BucketTail:
    """The end of one flat tensor: a section for each rank, then two flags for each of its slots.

    Args:
        memory: The elements behind the gradients, `size(...)` of them.
        num_slots: Parameters in the bucket.
        rank: This rank.
        world_size: All ranks.

    Attributes:
        complete: After `read`: whether every rank has all gradients, all dense.
        late: After `read`: whether a rank has gradients that came too late.
    """

    def __init__(self, memory: torch.Tensor, num_slots: int, *, rank: int, world_size: int) -> None:
        self.complete, self.late = False, False
        self._num_slots = num_slots
        self._world_size = world_size
        head = _SECTION * world_size
        self._all, self._head, self._flags = _fast(memory), _fast(memory[:head]), _fast(memory[head:])
        self._own = _fast(memory[_SECTION * rank : _SECTION * (rank + 1)])
        self._make = _maker(memory)
        self._blank = _fast(memory.new_tensor([0] * head + [1] * num_slots + [0] * num_slots))
        self._if_all_agree = b""

    @staticmethod
    def size(num_slots: int, world_size: int) -> int:
        """Elements that a tail takes."""
        return _SECTION * world_size + 2 * num_slots

    def write(self, stamp: bytes, *, late: bool, details: tuple[list[bool], list[bool]] | None) -> None:
        """Fill it in.

        Args:
            stamp: A `PassStamp`, encoded.
            late: This rank has gradients that did not make it into their buckets.
            details: By slot, whether this rank has a gradient and whether it is sparse; None: all of them, all dense.
        """
        self._all[:] = self._blank
        own = self._make(stamp + bytes((details is not None, late)))
        self._own[:] = own
        if details is None and not late:
            self._if_all_agree = own.tobytes() * self._world_size
            return
        self._if_all_agree = b""  # what this rank lacks is never what all agree on
        if details is not None:
            self._flags[:] = self._make(bytes([*details[0], *details[1]]))

    def read(self) -> None:
        """Take in what all ranks wrote, once it has been added up.

        Raises:
            CollectiveMismatchError: On every rank alike: they are not in the same backward pass.
        """
        self.complete, self.late = True, False
        if self._head.tobytes() == self._if_all_agree:
            return
        received = bytes(int(number.real) for number in self._head.tolist())
        sections = [received[start : start + _SECTION] for start in range(0, len(received), _SECTION)]
        self.complete = not any(section[_INCOMPLETE] for section in sections)
        self.late = any(section[_LATE] for section in sections)
        stamps = [section[:_STAMP_BYTES] for section in sections]
        if len(set(stamps)) > 1:
            raise _parted(stamps)

    def details(self) -> tuple[list[bool], list[bool]]:
        """By slot: whether any rank has a gradient, and whether any has a sparse one."""
        flags = [number != 0 for number in self._flags.tolist()]
        return flags[: self._num_slots], flags[self._num_slots :]


def _parted(stamps: Sequence[bytes]) -> CollectiveMismatchError:
    """The error of ranks with different stamps."""
    places = [PassStamp.place_of(stamp) for stamp in stamps]
    if any(place != places[0] for place in places):
        return mismatch("the backward pass", places, BACKWARD_ADVICE)
    step = f"what came before step {places[0]['step']} (an optimizer step, or a learning rate, on some ranks only)"
    advice = "Let all replicas step their optimizers alike, and set the same learning rates."
    return mismatch(step, [PassStamp.updates_of(stamp) for stamp in stamps], advice)


@functools.lru_cache(maxsize=64)
def _summary(rates: tuple[float, ...]) -> tuple[float, int]:
    """The mean of learning rates and a digest of all, which seldom change."""
    return sum(rates) / len(rates) if rates else 0.0, zlib.crc32(struct.pack(f"{len(rates)}d", *rates))


@final
class _Slow:
    """A few elements that numpy cannot show: on another device, or in bfloat16."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def __setitem__(self, key: slice, numbers: _Slow) -> None:
        self._memory[key] = numbers._memory.to(self._memory.device)

    def tobytes(self) -> bytes:
        return self._memory.cpu().view(torch.uint8).numpy().tobytes()

    def tolist(self) -> list[Any]:
        values: list[Any] = self._memory.tolist()
        return values


def _is_shown(memory: torch.Tensor) -> bool:
    """Whether numpy can show it: elements are then read and written in a tenth of the time (0.5 of 6 us)."""
    return memory.device.type == "cpu" and memory.dtype in (torch.float32, torch.float64, torch.float16)


def _fast(memory: torch.Tensor) -> Any:
    """The same memory, by numpy where that can show it."""
    return memory.numpy() if _is_shown(memory) else _Slow(memory)


def _maker(memory: torch.Tensor) -> Callable[[bytes], Any]:
    """What makes elements of such memory of numbers below 256."""
    if _is_shown(memory):
        dtype = memory.numpy().dtype
        return lambda numbers: np.frombuffer(numbers, np.uint8).astype(dtype)
    return lambda numbers: _Slow(torch.frombuffer(bytearray(numbers), dtype=torch.uint8).to(memory.dtype))
