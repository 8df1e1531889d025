from __future__ import annotations

import sys

import pytest
import torch

from raydist.errors import FailedPreconditionError
from raydist.replicas.accelerator import accelerator_for
from tests.xla_world import IS_REAL, chips_here


def test_a_cpu_needs_nothing_but_a_seed() -> None:
    cpu = accelerator_for("cpu")
    assert cpu.device == torch.device("cpu")
    cpu.enter()
    cpu.seed(2**63 + 5)
    first = torch.rand(3)
    cpu.leave()
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_a_chip_is_torch_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch_xla", None)
        with pytest.raises(FailedPreconditionError, match="need torch_xla"):
            accelerator_for("xla:0")
    with chips_here(2):
        chip = accelerator_for("xla:1")
        chip.enter()
        chip.seed(3)
        assert torch.equal(torch.ones(2, device=chip.device) * 2, torch.full((2,), 2.0))
        chip.leave()
