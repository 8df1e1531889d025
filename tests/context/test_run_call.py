from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import raydist as rd
from raydist.context.run_call import require_call


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((None, ()), "needs a function, got None"),
        ((len, "abc"), "args must be a tuple .*, got str"),
        ((len, (), ["key"]), r"kwargs must be a dict .*, got \['key'\]"),
        ((len, (), None, {"check_in_sync": True}), r"options must be rd.RunOptions\(...\), got {"),
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
