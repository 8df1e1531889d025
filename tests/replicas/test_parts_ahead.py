from __future__ import annotations

from typing import Any

import torch

from raydist.core.values import Leaves
from raydist.mirroring.messages import StepPayload
from raydist.replicas.device_copies import Copying, DeviceCopies, PartsAhead
from raydist.replicas.step import PartSource, StepHeader

META = torch.device("meta")


class Counted:
    """Stands for the streams of a GPU."""

    def __init__(self) -> None:
        self.copies = 0

    def copy(self, value: torch.Tensor) -> Copying:
        self.copies += 1
        return Copying(value.to(META), event=None)

    def join(self, copying: Copying) -> torch.Tensor:
        return copying.tensor


def header(step: int) -> StepHeader:
    return StepHeader(step, 0, StepPayload(), sources=(PartSource(None, value=torch.ones(step + 1)),))


def ahead() -> tuple[PartsAhead, Counted]:
    streams: Any = Counted()
    return PartsAhead(DeviceCopies(META, streams)), streams


def test_a_part_that_is_on_its_way_is_not_sent_again() -> None:
    parts, streams = ahead()
    parts.begin(header(1), [])
    (found,) = parts.begun(header(1), [])
    assert isinstance(found, Copying)
    assert (found.tensor.shape, streams.copies) == ((2,), 1)
    parts.begun(header(1), [])
    assert streams.copies == 2, "it was taken: who runs the step again begins again"


def test_parts_of_another_step_are_dropped() -> None:
    parts, streams = ahead()
    parts.begin(header(1), [])
    (found,) = parts.begun(header(4), [])
    assert isinstance(found, Copying)
    assert (found.tensor.shape, streams.copies) == ((5,), 2)


def test_what_goes_wrong_ahead_goes_wrong_in_the_step() -> None:
    parts, _ = ahead()
    missing = StepHeader(1, 0, StepPayload(), sources=(PartSource(0, 0),))
    nothing: list[Leaves] = []
    parts.begin(missing, nothing)
    try:
        parts.begun(missing, nothing)
    except IndexError:
        return
    raise AssertionError("there is no such object")
