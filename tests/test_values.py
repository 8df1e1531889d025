from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.values import InputContext, PerReplica, ReduceOp


def test_a_reduction_is_parsed_from_itself_and_its_name() -> None:
    for op in ReduceOp:
        assert ReduceOp.parse(op) is ReduceOp.parse(op.name.lower()) is op
    names: list[Any] = ["average", "", "SUM ", 3, None]
    for name in names:
        with pytest.raises(InvalidArgumentError, match=r"one of SUM, MEAN, MIN, MAX, PRODUCT, got"):
            ReduceOp.parse(name)


def test_per_replica_holds_values_in_order() -> None:
    value = PerReplica(["a", "b"])
    assert value.values == ("a", "b")
    assert value.num_parts == 2
    assert repr(value) == "PerReplica(0: 'a', 1: 'b')"
    assert pickle.loads(pickle.dumps(value)).values == ("a", "b")


def test_per_replica_has_no_truth_value() -> None:
    with pytest.raises(InvalidArgumentError, match=r"strategy\.reduce"):
        bool(PerReplica([True, True]))


class Remote(PerReplica):
    def __init__(self) -> None:
        self._values = None
        self.fetches = 0

    def _fetch(self) -> tuple[int, ...]:
        self.fetches += 1
        return (1, 2)


def test_values_are_fetched_once_and_only_when_read() -> None:
    value = Remote()
    assert value.fetches == 0
    assert value.values + value.values == (1, 2, 1, 2)
    assert value.fetches == 1


def test_printing_is_reading() -> None:
    value = Remote()
    assert (repr(value), str(value), f"{value}") == ("PerReplica(0: 1, 1: 2)",) * 3
    assert value.fetches == 1


def test_per_replica_is_no_number() -> None:
    uses: list[Callable[[Any], Any]] = [
        *(float, int, complex, round, abs, operator.neg, operator.pos, "{:.3f}".format, torch.mean),
        *(lambda x: 1 + x, lambda x: x - 1, lambda x: 2 * x, lambda x: x / x, lambda x: x // 2, lambda x: x**2),
        *(lambda x: 2 % x, lambda x: sum([x, x]), lambda x: x < 1, lambda x: max(x, x), lambda x: x @ x),
        *(lambda x: torch.stack([x, x]), lambda x: torch.ones(2) + x, lambda x: torch.ones(2).add(x)),
        lambda x: np.float32(1) + x,
    ]
    for use in uses:
        with pytest.raises(InvalidArgumentError, match=r"strategy\.reduce.*strategy\.local_results"):
            use(PerReplica([1.0, 2.0]))
    for name in ("item", "numpy", "detach", "backward"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'.*strategy\.reduce.*strategy\.local_results"):
            getattr(PerReplica([1.0]), name)


def test_an_attribute_error_of_a_step_comes_out_of_values() -> None:
    class Failed(PerReplica):
        def _fetch(self) -> tuple[int, ...]:
            raise AttributeError("the step's own")

    value = Failed([])
    value._values = None
    for read in (lambda: value.values, lambda: value.num_parts, lambda: repr(value)):
        with pytest.raises(AttributeError, match="^the step's own$"):
            read()


def test_per_replica_can_be_compared_by_identity_and_be_a_key() -> None:
    value = PerReplica([1])
    assert value == value
    assert value != PerReplica([1])
    assert {value: 1}[value] == 1
    assert copy.copy(value).values == (1,)


def test_per_replica_without_values_or_a_way_to_them_is_a_bug() -> None:
    value = PerReplica([])
    value._values = None
    with pytest.raises(FailedPreconditionError, match="raydist bug"):
        _ = value.values


@pytest.mark.parametrize(("size", "replicas", "expected"), [(32, 4, 8), (4, 1, 4), (0, 3, 0)])
def test_per_replica_batch_size(size: int, replicas: int, expected: int) -> None:
    assert InputContext(num_replicas_in_sync=replicas).get_per_replica_batch_size(size) == expected


def test_indivisible_batch_size_names_the_sizes_next_to_it() -> None:
    with pytest.raises(InvalidArgumentError, match=r"got 10 and 4. Use 8 or 12"):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(10)
