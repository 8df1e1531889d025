from __future__ import annotations

import sys

import pytest

from raydist.collectives.xla.chip import Chip
from raydist.errors import FailedPreconditionError, UnavailableError
from raydist.values import ReduceOp
from tests.xla_world import IS_REAL, chips_here


def test_a_host_without_torch_xla_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(FailedPreconditionError, match=r"need torch_xla, but host .* says: .*pip install 'torch~="):
        Chip(0).open()


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_a_chip_that_the_host_does_not_have(chips: None) -> None:
    with pytest.raises(UnavailableError, match=r"must work on chip 3 of host .*, but it has 3\. Check that"):
        Chip(3).open()


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_a_chip_alone() -> None:
    import torch

    with chips_here(1):
        chip = Chip(0).open()
        assert (chip.ordinal, chip.num_chips) == (0, 1)
        mine = torch.arange(3.0, device=chip.device)
        chip.launch()
        total, everyones = chip.all_reduce(mine, ReduceOp.SUM), chip.all_gather(mine)
        chip.wait()
        assert total.tolist() == [0.0, 1.0, 2.0]
        assert everyones.tolist() == [[0.0, 1.0, 2.0]]


def test_without_a_word_about_the_device_it_is_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_REAL:
        pytest.skip("a process has one kind of device for its life")
    import os

    with chips_here(1):
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
        Chip(0).open()
        assert os.environ["PJRT_DEVICE"] == "TPU"  # else torch_xla takes the CPU where it sees no TPU
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        Chip(0).open()
        assert os.environ["PJRT_DEVICE"] == "CPU"
