from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest

from raydist.nest import LEAF, flatten
from raydist.pickling.by_fields import by_fields
from raydist.replicas.results import StepResult
from raydist.replicas.step import PartSource
from raydist.replicas.step_message import GroupResult, StepMessage


@dataclass(frozen=True, slots=True)
class Travelling:
    first: int
    second: tuple[str, ...] = ()
    third: dict[str, int] = field(default_factory=dict, compare=False)

    __reduce__ = by_fields


@pytest.mark.parametrize(
    "value",
    [
        Travelling(1, ("a", "b"), {"x": 3}),
        PartSource(None, value=b"x", on_host=True),
        StepMessage(b"headers", ((PartSource(1),), ()), (4, 5)),
        StepResult(LEAF, (3.0,), absent=True, rows=7),
        StepResult(flatten({"b": 1, "a": (2, None)})[1], (1, 2, None)),
    ],
)
def test_what_is_read_back_is_equal(value: object) -> None:
    assert pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)) == value


def test_all_fields_travel() -> None:
    read = pickle.loads(pickle.dumps(Travelling(1, ("a",), {"x": 3})))
    assert read.third == {"x": 3}
    result = GroupResult((StepResult(LEAF, (1,)),), 2.5, None, ("remark",))
    back = pickle.loads(pickle.dumps(result))
    assert (back.results, back.seconds, back.error, back.remarks) == (result.results, 2.5, None, ("remark",))


def test_it_is_read_in_one_call() -> None:
    assert Travelling(1).__reduce__() == (Travelling, (1, (), {}))
