from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from raydist.parameter_servers.closure_requests import EndClosure, Finish
from raydist.parameter_servers.lanes.area import AreaAddress, AreaBlock
from raydist.parameter_servers.lanes.quick_pickle import QuickPickler
from raydist.parameter_servers.requests import LocateSlices, Push, PushKey, Sender, ServerAnswer
from raydist.parameter_servers.slices import ServedSlice

ME = Sender(1, 2)


@pytest.mark.parametrize(
    "value",
    [
        Push(ME, PushKey(1, 2, 3), 4, (5,), ("rows",), options=({"lr": 0.1, "betas": (0.9, 0.99)},), pull=(5,)),
        ServerAnswer(3, "late", 4, 5, {"a": [1]}),
        (1, EndClosure(ME, 7), AreaBlock(1, b"x", AreaAddress("a", b"b", 3))),
        LocateSlices(),
        Finish(3),
        [ServedSlice(1, 2, "v/part_0", 3, 4, (5, 6), torch.bfloat16)],
    ],
)
def test_all_comes_as_it_went(value: Any) -> None:
    assert pickle.loads(QuickPickler().dumps(value)) == value
