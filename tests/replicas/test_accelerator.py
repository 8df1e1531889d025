from __future__ import annotations

import sys

import pytest
import torch

from raydist.core.errors import DeadlineExceededError, FailedPreconditionError
from raydist.replicas.device_copies import Accelerator
from raydist.utils.torch_modes import TorchModes, TorchSettings
from tests.xla_world import IS_REAL, chips_here


def test_a_cpu_needs_nothing_but_a_seed() -> None:
    cpu = Accelerator("cpu")
    assert cpu.device == torch.device("cpu")
    cpu.enter()
    cpu.seed(2**63 + 5)
    first = torch.rand(3)
    cpu.leave()
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


def test_steps_work_in_the_modes_that_came_with_them() -> None:
    cpu = Accelerator("cpu")
    with cpu.working(TorchModes(grad=False, settings=TorchSettings(torch.float64)), 1.0):
        assert (torch.ones(1).dtype, torch.is_grad_enabled()) == (torch.float64, False)
    with cpu.working(None, 1.0):
        assert TorchModes.here() is None


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
