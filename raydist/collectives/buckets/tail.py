"""What travels behind the gradients of a bucket, in the same all-reduce: who sends it, and what its sender lacks.

A sum in which each rank fills a place of its own and leaves the others zero is an all-gather. So every rank learns
which step and backward pass each other one is in, without a round trip for it. Numbers travel as bytes, since every
dtype of a gradient holds those exactly (bfloat16: whole numbers up to 256).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.collectives.buckets.agreement import mismatch
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

    def encode(self) -> list[int]:
        rates = self.updates.rates
        numbers = _NUMBERS.pack(
            self.step % (1 << 32),
            self.backward % (1 << 16),
            self.updates.count % (1 << 32),
            sum(rates) / len(rates) if rates else 0.0,
            zlib.crc32(struct.pack(f"{len(rates)}d", *rates)),
        )
        return [*numbers, int(self.adds_up), int(self.relayout)]

    @staticmethod
    def place_of(encoded: Sequence[int]) -> dict[str, Hashable]:
        """Where a rank is in its program, by what it has encoded; for messages."""
        step, backward, _, _, _ = _NUMBERS.unpack(bytes(encoded[:-2]))
        adds_up, relayout = encoded[-2:]
        layout = {"layout of trained parameters": "changes"} if relayout else {}
        return {"step": step, "backward pass": backward, "op": "SUM" if adds_up else "MEAN", **layout}

    @staticmethod
    def updates_of(encoded: Sequence[int]) -> dict[str, Hashable]:
        """What a rank has done before, by what it has encoded; for messages."""
        _, _, count, rate, digest = _NUMBERS.unpack(bytes(encoded[:-2]))
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
        self._blank = _fast(memory.new_tensor([0] * head + [1] * num_slots + [0] * num_slots))
        self._if_all_agree: list[int] = []
        self._received: list[int] = []

    @staticmethod
    def size(num_slots: int, world_size: int) -> int:
        """Elements that a tail takes."""
        return _SECTION * world_size + 2 * num_slots

    def write(self, stamp: list[int], *, late: bool, details: tuple[list[bool], list[bool]] | None) -> None:
        """Fill it in.

        Args:
            stamp: A `PassStamp`, encoded.
            late: This rank has gradients that did not make it into their buckets.
            details: By slot, whether this rank has a gradient and whether it is sparse; None: all of them, all dense.
        """
        self._all[:] = self._blank
        self._own[:] = [*stamp, int(details is not None), int(late)]
        if details is not None:
            self._flags[:] = [*details[0], *details[1]]
        # What this rank lacks is never what all agree on: then details are read.
        self._if_all_agree = [*stamp, 0, 0] * self._world_size

    def read(self) -> None:
        """Take in what all ranks wrote, once it has been added up.

        Raises:
            CollectiveMismatchError: On every rank alike: they are not in the same backward pass.
        """
        received = self._head.tolist()
        self.complete, self.late = True, False
        if received == self._if_all_agree:
            return
        self._received = [int(number.real) for number in received]
        self.complete = not any(section[_INCOMPLETE] for section in self._sections())
        self.late = any(section[_LATE] for section in self._sections())
        stamps = [tuple(section[:_STAMP_BYTES]) for section in self._sections()]
        if len(set(stamps)) > 1:
            raise _parted(stamps)

    def details(self) -> tuple[list[bool], list[bool]]:
        """By slot: whether any rank has a gradient, and whether any has a sparse one."""
        flags = [number != 0 for number in self._flags.tolist()]
        return flags[: self._num_slots], flags[self._num_slots :]

    def _sections(self) -> list[list[int]]:
        return [self._received[start : start + _SECTION] for start in range(0, len(self._received), _SECTION)]


def _parted(stamps: Sequence[Sequence[int]]) -> CollectiveMismatchError:
    """The error of ranks with different stamps."""
    places = [PassStamp.place_of(stamp) for stamp in stamps]
    if any(place != places[0] for place in places):
        return mismatch("the backward pass", places)
    step = f"what came before step {places[0]['step']} (an optimizer step, or a learning rate, on some ranks only)"
    return mismatch(step, [PassStamp.updates_of(stamp) for stamp in stamps])


@final
class _Slow:
    """A few elements that numpy cannot show: on another device, or in bfloat16."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def __setitem__(self, key: slice, numbers: list[int] | _Slow) -> None:
        self._memory[key] = numbers._memory if isinstance(numbers, _Slow) else self._memory.new_tensor(numbers)

    def tolist(self) -> list[Any]:
        values: list[Any] = self._memory.tolist()
        return values


def _fast(memory: torch.Tensor) -> Any:
    """The same memory, to be read and written in a tenth of the time that a tensor takes (0.5 of 6 us) if possible."""
    shown = memory.device.type == "cpu" and memory.dtype in (torch.float32, torch.float64, torch.float16)
    return memory.numpy() if shown else _Slow(memory)
