"""Values of several replicas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.context.strategy_values import gather, reduce, regroup
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.values import PerReplica, ReduceOp
from tests.returned_classes import ModelOutput

UNEVEN = PerReplica([torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])])


def test_axis_none_adds_element_by_element_and_several_axes_take_all() -> None:
    value = PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    assert reduce(ReduceOp.SUM, value, None, 2).tolist() == [4.0, 6.0]
    assert reduce(ReduceOp.MEAN, value, None, 2).tolist() == [2.0, 3.0]
    ones = PerReplica([torch.ones(2, 3), torch.ones(1, 3)])
    assert reduce("SUM", {"a": ones}, (0, 1), 2)["a"].item() == 9.0
    assert reduce("MEAN", ones, [0], 2).tolist() == [1.0, 1.0, 1.0]


def test_a_mean_of_integers_is_a_float_and_booleans_are_counted() -> None:
    assert reduce("mean", PerReplica([1, 2]), None, 2).item() == 1.5
    assert reduce("MEAN", PerReplica([torch.tensor([1, 2]), torch.tensor([4])]), 0, 2).item() == pytest.approx(7 / 3)
    hits = PerReplica([torch.tensor([True, False]), torch.tensor([True])])
    assert reduce("SUM", hits, 0, 2).item() == 2
    assert reduce("MEAN", hits, 0, 2).item() == pytest.approx(2 / 3)


class Weighted(PerReplica):
    """A step's result: each replica's of so many rows."""

    def __init__(self, values: list[Any], rows: tuple[int, ...]) -> None:
        super().__init__(values)
        self._rows = rows

    @property
    def weights(self) -> tuple[int, ...]:
        return self._rows


def test_a_mean_weighs_replicas_by_their_rows() -> None:
    means = Weighted([torch.tensor([1.0, 10.0]), torch.tensor([4.0, 40.0])], (2, 1))
    assert reduce("MEAN", means, None, 2).tolist() == [2.0, 20.0]
    assert reduce("SUM", means, None, 2).tolist() == [5.0, 50.0]
    assert reduce("MEAN", means, 0, 2).item() == 55 / 4  # every entry counts once: rows have no say
    assert reduce("MEAN", Weighted([1, 4], (3, 1)), None, 2).item() == 1.75


def test_what_has_no_rows_weighs_nothing_and_may_be_nan() -> None:
    assert reduce("MEAN", Weighted([3.0, math.nan], (2, 0)), None, 2).item() == 3.0
    assert reduce("MEAN", Weighted([3.0, 5.0], (0, 0)), None, 2).item() == 4.0
    assert math.isnan(reduce("MEAN", Weighted([3.0, math.nan], (2, 1)), None, 2).item())


def test_a_weighted_mean_keeps_its_type_and_does_not_overflow() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        means = Weighted([torch.tensor(1024.0, dtype=dtype), torch.tensor(3072.0, dtype=dtype)], (30_000, 10_000))
        mean = reduce("MEAN", means, None, 2)
        assert mean.dtype is dtype
        assert mean.real.item() == 1536.0


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_mean_of_means_is_that_of_all_rows(parts: list[list[float]]) -> None:
    means = [torch.tensor(part, dtype=torch.float64).mean() for part in parts]
    value = Weighted(means, tuple(map(len, parts)))
    assert reduce("MEAN", value, None, len(parts)).item() == pytest.approx(np.concatenate(parts).mean(), abs=1e-12)


@given(st.lists(st.lists(st.integers(-5, 5), max_size=4), min_size=1, max_size=4).filter(lambda parts: any(parts)))
def test_reduce_over_rows_equals_numpy_on_all_rows(parts: list[list[int]]) -> None:
    value = PerReplica([torch.tensor(part, dtype=torch.float64) for part in parts])
    rows = np.concatenate([np.array(part, dtype=float) for part in parts])
    assert reduce("SUM", value, 0, len(parts)).item() == rows.sum()
    assert reduce("MEAN", value, 0, len(parts)).item() == pytest.approx(rows.mean())
    assert gather(value, 0).tolist() == rows.tolist()


def test_bad_reduce() -> None:
    cases: list[tuple[str, Any, Any, str]] = [
        ("MAX", UNEVEN, 0, r"takes SUM or MEAN, got MAX\. Gather and reduce locally"),
        ("median", UNEVEN, 0, "must be one of .* got 'median'"),
        ("SUM", UNEVEN, None, r"one shape, got \[\(4,\), \(2,\)\]"),
        ("SUM", UNEVEN, 1, r"got 1 for shape \(4,\)"),
        ("SUM", UNEVEN, "rows", "A dimension must be given as an int .*, got 'rows'"),
        ("SUM", UNEVEN, 1.5, "as an int .*, got 1.5"),
        ("SUM", UNEVEN, True, "as an int .*, got True"),
        ("SUM", UNEVEN, (0, None), "as an int .*, got None"),
        ("SUM", UNEVEN, (0, -1), r"named once, got axis=\(0, -1\)"),
        ("SUM", 3.0, None, "needs a PerReplica"),
        ("SUM", PerReplica([]), None, "no replica had rows"),
        ("SUM", PerReplica([torch.ones(1, 2), torch.ones(1, 3)]), 0, "must agree over replicas"),
    ]
    for op, value, axis, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            reduce(op, value, axis, 2)


def test_what_is_no_number_cannot_be_reduced() -> None:
    with pytest.raises(SpecError, match=r"tensors and numbers .* got NoneType: None as value 2 of 2\. Return one"):
        reduce("SUM", PerReplica([1.0, None]), None, 2)
    with pytest.raises(SpecError, match=r"got str: 'a'\. Return one"):
        gather("a", 0)
    with pytest.raises(SpecError, match=r"got NoneType: None as value 2 of 2\. Return one"):
        gather(PerReplica([torch.ones(1), None]), 0)


def test_a_leaf_that_cannot_be_reduced_is_named() -> None:
    value = ModelOutput(loss=PerReplica([1.0, 3.0]), text=PerReplica(["a", "b"]))
    with pytest.raises(SpecError, match="In the leaf 'text' of the ModelOutput: Only tensors .*[.] Or take"):
        reduce("MEAN", value, None, 2)
    with pytest.raises(InvalidArgumentError, match="In the leaf 'loss' of the ModelOutput: gather needs .*[.] Or take"):
        gather(value, 0)
    reduced = reduce("MEAN", ModelOutput(loss=PerReplica([1.0, 3.0])), None, 2)
    assert (type(reduced), reduced.loss, reduced["loss"], reduced.text) == (ModelOutput, 2, 2, None)


def test_gather_keeps_rank_order_and_checks_shapes() -> None:
    assert gather(UNEVEN, 0).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    columns = PerReplica([torch.ones(2, 1), torch.zeros(2, 2)])
    assert gather(columns, 1).shape == (2, 3)
    with pytest.raises(InvalidArgumentError, match="needs values with dimension 0"):
        gather(PerReplica([torch.tensor(1.0), torch.tensor(2.0)]), 0)
    with pytest.raises(InvalidArgumentError, match="must agree"):
        gather(columns, 0)
    bad_axes: tuple[Any, ...] = (None, "rows", 0.0, False)
    for axis in bad_axes:
        with pytest.raises(InvalidArgumentError, match="A dimension must be given as an int"):
            gather(UNEVEN, axis)
    assert gather({"cache": PerReplica([None, None]), "more": None}, 0) == {"cache": None, "more": None}


def test_values_of_replicas_become_one_nest() -> None:
    x, rest = regroup([(1, {"a": 2}), (3, {"a": 4})])
    assert (x.values, rest["a"].values) == ((1, 3), (2, 4))
    assert regroup([[1], [2]]).values == ([1], [2])  # a list is a leaf
    with pytest.raises(
        SpecError,
        match=r"got \{'a': '\*'\} from replica 0 and \* from replica 1 \(\* is a value\)\. Return the same nest",
    ):
        regroup([{"a": 1}, 2])
