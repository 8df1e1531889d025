"""Arguments of run, and notes for errors of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed

import raydist as rd
from raydist.context.run_call import advise, require_call


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((None, ()), "needs a function, got None"),
        ((len, "abc"), "args must be a tuple .*, got str"),
        ((len, (), ["key"]), r"kwargs must be a dict .*, got \['key'\]"),
        ((len, (), None, {"param_sync_every": True}), r"options must be rd.RunOptions\(...\), got {"),
    ],
)
def test_what_is_no_call_of_a_step(call: Sequence[Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        require_call(*call)


def test_a_whole_dataset_is_no_batch() -> None:
    dataset = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(1))
    with pytest.raises(rd.InvalidArgumentError, match=r"got a DistributedDataset. Give args=\(iter\(dataset\),\)"):
        require_call(len, (dataset,))


def test_calls_that_are_fine() -> None:
    require_call(len, ([],))
    require_call(len, [1], {"a": 2}, rd.RunOptions())


def test_a_collective_of_torch_without_a_group_is_told_of_ours() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with pytest.raises(ValueError, match="has not been initialized") as caught:
        strategy.run(lambda: torch.distributed.all_reduce(torch.ones(1)))
    assert "rd.get_replica_context().all_reduce" in caught.value.__notes__[0]


def test_all_else_speaks_for_itself() -> None:
    error = ValueError("bad")
    advise(error)
    assert not hasattr(error, "__notes__")
