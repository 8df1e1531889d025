from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.nest import LEAF
from raydist.replicas.messages.number_results import NumberResults
from raydist.replicas.messages.step_message import GroupResult
from raydist.replicas.results import StepResult, pack_result
from tests.summaries.records import record_of

VALUES = {
    torch.float32: st.floats(width=32, allow_nan=False),
    torch.float64: st.floats(allow_nan=False),
    torch.int64: st.integers(-(2**63), 2**63 - 1),
    torch.bool: st.booleans(),
}


@given(st.data(), st.sampled_from(list(VALUES)))
def test_numbers_are_read_back_bit_by_bit(data: st.DataObject, dtype: torch.dtype) -> None:
    values = data.draw(st.lists(VALUES[dtype], min_size=1, max_size=8))
    absent = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    rows = data.draw(st.lists(st.none() | st.integers(0, 9), min_size=len(values), max_size=len(values)))
    sent = [torch.tensor(value, dtype=dtype) for value in values]
    columns = zip(sent, absent, rows, strict=True)
    results = tuple(pack_result(value, absent=missing, rows=count) for value, missing, count in columns)
    back = pickle.loads(pickle.dumps(GroupResult(results, 0.5, None, ("a remark",))))
    assert (back.seconds, back.error, back.remarks) == (0.5, None, ("a remark",))
    assert [(result.absent, result.rows) for result in back.results] == list(zip(absent, rows, strict=True))
    for result, value in zip(back.results, sent, strict=True):
        assert result.structure == LEAF
        assert result.leaf(0).dtype is dtype
        assert result.leaf(0).numpy().tobytes() == value.numpy().tobytes()


def test_results_of_numbers_travel_in_columns() -> None:
    results = tuple(pack_result(torch.tensor(float(place)), absent=False) for place in range(6))
    whole, one = (len(pickle.dumps(GroupResult(some))) for some in (results, results[:1]))
    assert whole < one + 6 * 12


@pytest.mark.parametrize(
    "other",
    [
        pack_result((torch.tensor(1.0),), absent=False),
        pack_result({"loss": torch.tensor(1.0)}, absent=False),
        pack_result(torch.ones(1), absent=False),
        pack_result(torch.tensor(1.0, dtype=torch.float64), absent=False),
        pack_result(1.0, absent=False),
        pack_result(None, absent=False),
        pack_result(np.float32(1.0), absent=False),
        pack_result(torch.tensor(1.0), absent=False, summaries=(record_of("a", 1.0),)),
    ],
)
def test_others_travel_as_they_are(other: StepResult) -> None:
    number = pack_result(torch.tensor(2.0), absent=False)
    for results in [(number, other), (other, number)]:
        assert NumberResults.of(results) is None
        back = pickle.loads(pickle.dumps(GroupResult(results)))
        assert [_shown(result) for result in back.results] == [_shown(result) for result in results]


def test_no_results_travel_as_they_are() -> None:
    assert NumberResults.of(()) is None
    assert pickle.loads(pickle.dumps(GroupResult((), 1.0))).results == ()


def _shown(result: StepResult) -> tuple[Any, ...]:
    leaves = [str(result.leaf(index)) for index in range(len(result.leaves))]
    return result.structure, leaves, result.absent, result.rows, len(result.summaries)
