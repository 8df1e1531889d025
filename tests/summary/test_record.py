"""Records, the merging of the records of replicas, and conversions of arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.summary.media import Text
from raydist.summary.record import Record, as_array, merge, step_number
from raydist.summary.scalars import ScalarValue
from tests.summary.records import record_of


def test_a_record_is_settled_with_what_it_shows() -> None:
    assert record_of("loss", ScalarValue(torch.tensor(2.0))).settled() == record_of("loss", 2.0)
    settled = record_of("loss", 2.0)
    assert settled.settled() is settled


def test_its_place_is_what_records_of_replicas_have_in_common() -> None:
    assert record_of("a", 1.0).place == record_of("a", 2.0).place
    assert record_of("a", 1.0).place != record_of("a", 1.0, step=1).place


def brief(records: list[Record]) -> list[tuple[str, int, object]]:
    return [(record.name, record.step, getattr(record.data, "value", record.data)) for record in records]


def test_calls_of_one_name_and_step_belong_together_by_their_order() -> None:
    first = [record_of("loss", 1.0), record_of("loss", 2.0), record_of("loss", 7.0, step=1)]
    second = [record_of("loss", 3.0), record_of("loss", 4.0), record_of("loss", 9.0, step=1)]
    assert brief(merge([first, second])) == [("loss", 0, 2.0), ("loss", 0, 3.0), ("loss", 1, 8.0)]


def test_a_replica_may_leave_some_out() -> None:
    assert brief(merge([[], [record_of("only here", 3.0)]])) == [("only here", 0, 3.0)]
    assert brief(merge([[record_of("a", 1.0)], [record_of("b", 3.0), record_of("a", 2.0)]])) == [
        ("a", 0, 1.5),
        ("b", 0, 3.0),
    ]


def test_kinds_of_one_name_stay_apart() -> None:
    text = Text(("hello",))
    assert brief(merge([[record_of("x", 1.0)], [record_of("x", text)]])) == [("x", 0, 1.0), ("x", 0, text)]


def test_of_one_replica_nothing_changes() -> None:
    records = [record_of("a", 1.0), record_of("a", 2.0)]
    assert merge([records]) == records


@pytest.mark.parametrize("step", [3, np.int32(3), np.array(3), torch.tensor(3), torch.tensor([3])])
def test_whole_numbers_of_all_kinds_are_steps(step: Any) -> None:
    assert step_number(step) == 3
    assert type(step_number(step)) is int


@pytest.mark.parametrize("step", [1.5, "3", True, torch.tensor(1.5), torch.tensor([1, 2]), [3], 2**63, -(2**63) - 1])
def test_other_things_are_not(step: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="The step of a summary must be a whole number, got"):
        step_number(step)


def test_tensors_of_all_kinds_are_arrays() -> None:
    assert as_array(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]
    assert as_array(torch.ones(1, dtype=torch.float16)).dtype == np.float32
    assert as_array(torch.nn.Parameter(torch.ones(1))).tolist() == [1]
    assert as_array([1, 2]).tolist() == [1, 2]
