"""Devices of replicas: copies to them in two steps, seeds and settings. Fakes replace the streams of a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from raydist.core.errors import DeadlineExceededError, FailedPreconditionError
from raydist.core.values import Leaves
from raydist.mirroring.messages import StepPayload
from raydist.replicas.device_copies import Accelerator, Copying, DeviceCopies, PartsAhead
from raydist.replicas.step import PartSource, StepHeader
from raydist.utils.torch_modes import TorchModes, TorchSettings
from tests.xla_world import IS_REAL, chips_here

CPU, META = torch.device("cpu"), torch.device("meta")


class Recorded:
    """Stands for `CudaStreams`: notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def copy(self, value: torch.Tensor) -> Copying:
        self.calls.append("copy")
        return Copying(value.to(META), event="there")

    def join(self, copying: Copying) -> torch.Tensor:
        self.calls.append(f"join {copying.event}")
        return copying.tensor


def test_a_copy_begins_early_and_is_joined_where_it_is_used() -> None:
    streams: Any = Recorded()
    copies = DeviceCopies(META, streams)
    for value in (torch.ones(2, device=META), "text", 3):  # which need no copy
        assert copies.finish(copies.begin(value)) is value
    assert streams.calls == []
    begun = copies.begin(torch.ones(2))
    assert streams.calls == ["copy"]
    assert copies.finish(begun).device == META
    assert copies.finish(begun) is copies.finish(begun)
    assert streams.calls == ["copy", *["join there"] * 3]
    assert copies.overlap
    plain, value = DeviceCopies.to(CPU), torch.ones(2)  # a device without streams
    assert plain.finish(plain.begin(value)) is value
    assert not plain.overlap
    assert DeviceCopies(META).begin(value).device == META


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    copies = DeviceCopies.to(torch.device("cuda:0"))
    values = [torch.full((1 << 20,), float(number)) for number in range(8)]
    begun = [copies.begin(value) for value in values]
    assert [float(copies.finish(each).sum()) for each in begun] == [float(value.sum()) for value in values]


def header(step: int) -> StepHeader:
    return StepHeader(step, 0, StepPayload(), sources=(PartSource(None, value=torch.ones(step + 1)),))


def test_a_part_that_is_on_its_way_is_not_sent_again() -> None:
    streams: Any = Recorded()
    parts = PartsAhead(DeviceCopies(META, streams))
    parts.begin(header(1), [])
    (found,) = parts.begun(header(1), [])
    assert isinstance(found, Copying)
    assert (found.tensor.shape, streams.calls.count("copy")) == ((2,), 1)
    parts.begun(header(1), [])
    assert streams.calls.count("copy") == 2, "it was taken: who runs the step again begins again"
    parts.begin(header(1), [])
    (found,) = parts.begun(header(4), [])  # those of another step are dropped
    assert isinstance(found, Copying)
    assert (found.tensor.shape, streams.calls.count("copy")) == ((5,), 4)
    missing, nothing = StepHeader(1, 0, StepPayload(), sources=(PartSource(0, 0),)), list[Leaves]()
    parts.begin(missing, nothing)  # what goes wrong ahead goes wrong in the step
    with pytest.raises(IndexError):
        parts.begun(missing, nothing)


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_chips_of_one_process_take_turns_with_its_settings() -> None:
    double = TorchModes(settings=TorchSettings(torch.float64))
    with chips_here(2):
        first, second = Accelerator("xla:0"), Accelerator("xla:1")
        with first.working(double, 1.0), second.working(double, 1.0):
            assert torch.ones(1).dtype is torch.float64
            with pytest.raises(DeadlineExceededError), first.working(None, 0.01):
                pass
        with first.working(None, 0.01):
            assert torch.ones(1).dtype is torch.float32


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_a_chip_is_torch_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch_xla", None)
        with pytest.raises(FailedPreconditionError, match="need torch_xla"):
            Accelerator("xla:0")
    with chips_here(2):
        chip = Accelerator("xla:1")
        chip.enter()
        chip.seed(3)
        assert torch.equal(torch.ones(2, device=chip.device) * 2, torch.full((2,), 2.0))
        chip.leave()
