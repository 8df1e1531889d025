from __future__ import annotations

import copyreg
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


class Late:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("it is asked for elsewhere")


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


def test_what_others_have_registered_comes_too() -> None:
    rows = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 3), (4, 3), check_invariants=False)
    pickler = QuickPickler()
    copyreg.pickle(Late, lambda late: (Late, (7,)))
    try:
        answer, late = pickle.loads(pickler.dumps((ServerAnswer(value=rows), Late(7))))
    finally:
        del copyreg.dispatch_table[Late]
    assert torch.equal(answer.value.to_dense(), rows.to_dense())
    assert late.number == 7
