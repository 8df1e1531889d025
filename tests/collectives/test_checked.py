from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from raydist.collectives.base import Communicator, Work
from raydist.collectives.checked import Call, CheckedCommunicator, all_hold, describe_call, exchange
from raydist.core.errors import CollectiveMismatchError
from raydist.core.values import ReduceOp
from tests.collectives.local_group import LocalGroup
from tests.collectives.shared_memory.ranks import run_sharing
from tests.collectives.threads import run_ranks
from tests.contracts import communicator as contract


def ones(rank: int) -> torch.Tensor:
    """More of them on rank 1."""
    return torch.ones(2 + rank)


def test_calls_survive_the_journey() -> None:
    call = describe_call(
        "all_gather(axis=-1)", torch.ones(2, 0, 3, dtype=torch.bfloat16), number=5, differentiable=True
    )
    assert Call.decode(call.encode()) == call
    assert str(call) == "all_gather(axis=-1) of torch.bfloat16 (2, 0, 3) as call 5"


def test_nothing_is_added_where_the_other_one_checks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(communicator: Communicator) -> list[float]:
        monkeypatch.setattr(communicator, "all_gather", refuse)
        checked = CheckedCommunicator(communicator)
        assert checked.checks_itself
        tensor = torch.ones(1)
        checked.all_reduce(tensor, ReduceOp.SUM).wait()
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: .* \(2,\) .*rank 1: .* \(3,\)"):
            checked.all_reduce(torch.ones(2 + communicator.rank), ReduceOp.SUM).wait()
        return tensor.tolist()

    def refuse(outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        raise AssertionError("a round of its own")

    assert run_sharing(2, body) == [[2.0], [2.0]]


def test_memory_is_the_other_ones() -> None:
    def body(group: LocalGroup) -> object:
        checked = CheckedCommunicator(group)
        return contract.sums_of_allocated(checked)

    assert run_ranks(2, body) == run_ranks(2, contract.sums_of_allocated)


@pytest.mark.parametrize(("held", "alike"), [((5, 5, 5), True), ((5, 5, 6), False)])
def test_all_are_told_whether_all_hold_the_same(held: tuple[int, ...], alike: bool) -> None:
    def body(group: LocalGroup) -> bool:
        return all_hold(group, describe_call("comparison", None), held[group.rank])

    assert run_ranks(3, body) == [alike] * 3


@pytest.mark.parametrize("held", [(5, 5), (5, 6)])
def test_who_calls_something_else_is_told_so_whatever_is_held(held: tuple[int, ...]) -> None:
    def body(group: LocalGroup) -> None:
        calls: list[Callable[[], object]] = [
            lambda: all_hold(group, describe_call("comparison", None), held[0]),
            lambda: exchange(group, describe_call("all_reduce(SUM)", torch.ones(2))),
            lambda: all_hold(group, describe_call("comparison", None), held[1]),
        ]
        with pytest.raises(CollectiveMismatchError, match=r"comparison.*all_reduce.*comparison"):
            calls[group.rank]()

    run_ranks(3, body)
