"""Plans of faults that cannot be are refused; what they do is in tests/chaos/test_lost_replicas.py."""

from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from raydist.testing import Fault, FaultPlan


def test_faults_and_options_that_cannot_be_are_refused() -> None:
    bad: list[dict[str, Any]] = [{"role": "driver"}, {"how": "hang"}, {"role": "input", "how": "stop"}, {"rank": -1}]
    for values in bad:
        with pytest.raises(rd.InvalidArgumentError, match="A fault must have"):
            Fault(1, **values)
    with pytest.raises(rd.InvalidArgumentError, match="replicas in lock step"):
        FaultPlan(Fault(1)).arm(rd.OneDeviceStrategy("cpu"))
    with pytest.raises(rd.InvalidArgumentError, match="rank < 2"):
        FaultPlan(Fault(1, rank=2)).arm(rd.MirroredStrategy(["CPU:0", "CPU:1"]))
    with pytest.raises(rd.InvalidArgumentError, match="spares must be a number >= 0"):
        rd.FailureOptions(spares=-1)
