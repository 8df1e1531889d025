"""The batch of the next step, brought to the device while this one runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, final

from raydist.replicas.device_copies import DeviceCopies
from raydist.replicas.step import StepHeader, resolve_parts
from raydist.values import Leaves

__all__ = ["PartsAhead"]


@final
class PartsAhead:
    """Parts of one step, on their way.

    Args:
        copies: Brings tensors to the device.
    """

    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies
        self._step = -1
        self._parts: list[Any] = []

    def begin(self, header: StepHeader, objects: Sequence[Leaves]) -> None:
        """Start to copy what a step will need. What goes wrong here goes wrong again in the step, where it belongs."""
        with contextlib.suppress(Exception):
            self._parts = resolve_parts(header.sources, objects, self._copies.begin)
            self._step = header.step

    def begun(self, header: StepHeader, objects: Sequence[Leaves]) -> list[Any]:
        """The parts of a step, all of them begun; those of another one are dropped."""
        step, parts = self._step, self._parts
        self._step, self._parts = -1, []
        return parts if step == header.step else resolve_parts(header.sources, objects, self._copies.begin)
