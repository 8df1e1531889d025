from __future__ import annotations

import pickle

import pytest

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.values import InputContext, PerReplica, ReduceOp


@pytest.mark.parametrize("op", list(ReduceOp))
def test_reduce_op_is_parsed_from_itself_and_its_name(op: ReduceOp) -> None:
    assert ReduceOp.parse(op) is op
    assert ReduceOp.parse(op.name.lower()) is op


@pytest.mark.parametrize("name", ["average", "", "SUM ", 3, None])
def test_unknown_reduction_is_an_error_that_lists_them(name: str) -> None:
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
    assert repr(value) == "Remote(<not fetched>)"
    assert value.fetches == 0
    assert value.values + value.values == (1, 2, 1, 2)
    assert value.fetches == 1


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
