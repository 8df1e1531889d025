from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.values import INFINITE_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine import request_size
from tests.contracts.op import collect, iterate
from tests.pipelines.model import recorder


def running(total: Any, x: Any) -> Any:
    return total + x, total + x


def test_the_state_goes_from_element_to_element() -> None:
    assert [int(x) for x in Dataset.range(5).scan(10, running)] == [10, 11, 13, 16, 20]
    fibonacci = Dataset.range(6).scan((0, 1), lambda pair, _: ((pair[1], pair[0] + pair[1]), pair[0]))
    assert [int(x) for x in fibonacci] == [0, 1, 1, 2, 3, 5]
    assert [int(x) for x in Dataset.range(2).scan(0, running).repeat(2)] == [0, 1, 0, 1]


def test_spec_and_cardinality() -> None:
    dataset = Dataset.range(5).scan(0.0, lambda total, x: (total, (x, "text")))
    assert dataset.element_spec == (TensorSpec((), "int64"), TensorSpec((), "str"))
    assert dataset.cardinality() == 5
    assert Dataset.range(5).repeat().scan(0, running).cardinality() == INFINITE_CARDINALITY


def test_an_error_leaves_the_state_as_it_was() -> None:
    def careful(total: Any, x: Any) -> Any:
        total += 0 * (6 // int(x - 1)) + x
        return total, total

    items = collect(iterate(Dataset.range(4).scan(0, careful)))
    assert [item[0] if isinstance(item, tuple) else int(item) for item in items] == [0, "ZeroDivisionError", 2, 5]


def test_a_state_that_is_changed_in_place_and_then_fails() -> None:
    def count(seen: Any, x: Any) -> Any:
        seen[int(x)] += 1
        return seen, 6 // int(x - 1) * 0 + seen.sum()

    items = collect(iterate(Dataset.range(3).scan([0, 0, 0], count)))
    assert [item[0] if isinstance(item, tuple) else int(item) for item in items] == [1, "ZeroDivisionError", 2]


@pytest.mark.parametrize("result", [3, (1,), (1.5, 2), ("text", 2), ((1, 2), 2)])
def test_the_function_must_return_a_state_of_one_kind(result: object) -> None:
    items = collect(iterate(Dataset.range(2).scan(0, lambda total, x: result)))
    assert [item[0] for item in items] == ["SpecError", "SpecError"]


def test_resuming_calls_the_function_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_QUICK_S", "_SLOW_S"):  # after a block that took long the next ones are cut elsewhere
        monkeypatch.setattr(request_size, limit, math.inf)
    calls: list[int] = []
    note = recorder(calls)
    dataset = Dataset.range(5).scan(0, lambda total, x: running(total, note(x)))
    first = iterate(dataset)
    assert [int(x) for x in collect(first, 3)] == [0, 1, 3]
    calls.clear()
    resumed = iterate(dataset)
    resumed.load_state_dict(first.state_dict())
    assert collect(resumed, 1) == [6]
    assert calls == [0, 1, 2, 3]


def test_reduce_gives_the_last_state() -> None:
    total = Dataset.range(5).reduce(np.int64(0), lambda total, x: total + x)
    assert isinstance(total, torch.Tensor)
    assert (int(total), total.dtype) == (10, torch.int64)
    count, text = Dataset.zip(Dataset.range(3), Dataset.range(3)).reduce(
        (0, "x"), lambda state, pair: (state[0] + pair[1], state[1] + "y")
    )
    assert (int(count), text) == (3, "xyyy")
    assert int(Dataset.range(0).reduce(7, lambda total, x: total + x)) == 7


def test_reduce_raises_the_first_error() -> None:
    with pytest.raises(ZeroDivisionError):
        Dataset.range(5).map(lambda x: 1 // int(x - 1)).reduce(0, lambda total, x: total + x)
    with pytest.raises(SpecError, match="must keep its structure and dtypes"):
        Dataset.range(5).reduce(0, lambda total, x: total + 0.5)


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="scan needs a function"):
        Dataset.range(5).scan(0, 3)  # type: ignore[arg-type]  # the point of this test
    with pytest.raises(InvalidArgumentError, match="reduce needs a function"):
        Dataset.range(5).reduce(0, 3)  # type: ignore[arg-type]  # the point of this test
    with pytest.raises(SpecError, match="A leaf must be"):
        Dataset.range(5).scan(object(), running)
