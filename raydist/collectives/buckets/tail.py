"""What travels behind the gradients of a bucket, in the same all-reduce: who sends it, and what its sender lacks.

A sum in which each rank fills a place of its own and leaves the others zero is an all-gather. So every rank learns
which step and backward pass each other one is in, without a round trip for it. Numbers travel as bytes, since every
dtype of a gradient holds those exactly (bfloat16: whole numbers up to 256).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.collectives.buckets.agreement import mismatch

__all__ = ["BucketTail", "PassStamp"]

_STEP_BYTES, _BACKWARD_BYTES = 4, 2
_STAMP_BYTES = _STEP_BYTES + _BACKWARD_BYTES + 2
# Behind the stamp: whether its rank's details must be read, and whether gradients came too late for their bucket.
_INCOMPLETE, _LATE = _STAMP_BYTES, _STAMP_BYTES + 1
_SECTION = _STAMP_BYTES + 2


@final
@dataclass(frozen=True, slots=True)
class PassStamp:
    """Which backward pass a rank is in.

    Attributes:
        step: Number of its step.
        backward: Number of the pass in its step.
        adds_up: Gradients are added up, not weighted.
        relayout: No gradients follow: this rank trains other parameters than before.
    """

    step: int
    backward: int
    adds_up: bool = False
    relayout: bool = False

    def encode(self) -> list[int]:
        step = (self.step % (1 << 8 * _STEP_BYTES)).to_bytes(_STEP_BYTES)
        backward = (self.backward % (1 << 8 * _BACKWARD_BYTES)).to_bytes(_BACKWARD_BYTES)
        return [*step, *backward, int(self.adds_up), int(self.relayout)]

    @staticmethod
    def decode(numbers: Sequence[int]) -> PassStamp:
        step, backward = bytes(numbers[:_STEP_BYTES]), bytes(numbers[_STEP_BYTES:-2])
        return PassStamp(int.from_bytes(step), int.from_bytes(backward), bool(numbers[-2]), bool(numbers[-1]))

    def describe(self) -> dict[str, object]:
        """For messages."""
        layout = {"layout of trained parameters": "changes"} if self.relayout else {}
        return {"step": self.step, "backward pass": self.backward, "op": "SUM" if self.adds_up else "MEAN", **layout}


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
        self._memory = memory
        self._num_slots = num_slots
        self._rank = rank
        self._num_head = _SECTION * world_size
        self._complete = torch.tensor([1] * num_slots + [0] * num_slots, dtype=memory.dtype, device=memory.device)
        self._head = _fast(memory[: self._num_head])
        self._flags = memory[self._num_head :]
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
        section = [*stamp, int(details is not None), int(late)]
        before = _SECTION * self._rank
        self._head[:] = [0] * before + section + [0] * (self._num_head - before - _SECTION)
        # What this rank lacks is never what all agree on: then details are read.
        agreed = [*stamp, 0, 0]
        self._if_all_agree = agreed * (self._num_head // _SECTION)
        if details is None:
            self._flags.copy_(self._complete)
        else:
            flags = torch.tensor([*details[0], *details[1]], dtype=self._memory.dtype, device=self._memory.device)
            self._flags.copy_(flags)

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
            raise mismatch("the backward pass", [PassStamp.decode(stamp).describe() for stamp in stamps])

    def details(self) -> tuple[list[bool], list[bool]]:
        """By slot: whether any rank has a gradient, and whether any has a sparse one."""
        flags = [number != 0 for number in self._flags.tolist()]
        return flags[: self._num_slots], flags[self._num_slots :]

    def _sections(self) -> list[list[int]]:
        return [self._received[start : start + _SECTION] for start in range(0, self._num_head, _SECTION)]


@final
class _Slow:
    """A few elements that numpy cannot show: on another device, or in bfloat16."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def __setitem__(self, key: slice, numbers: list[int]) -> None:
        self._memory[key] = torch.tensor(numbers, dtype=self._memory.dtype, device=self._memory.device)

    def tolist(self) -> list[Any]:
        values: list[Any] = self._memory.tolist()
        return values


def _fast(memory: torch.Tensor) -> Any:
    """The same memory, to be read and written in a tenth of the time that a tensor takes (0.5 of 6 us) if possible."""
    shown = memory.device.type == "cpu" and memory.dtype in (torch.float32, torch.float64, torch.float16)
    return memory.numpy() if shown else _Slow(memory)
