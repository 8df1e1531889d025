from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.mirroring.shipment import Shipment
from raydist.replicas.messages.header_runs import pack_headers, unpack_headers
from raydist.replicas.step import StepHeader
from raydist.summaries.order import SummaryOrder
from raydist.values import ReduceOp

PLAIN = StepHeader(0, 1, Shipment(digest=b"f"))

# A header that says something else than `PLAIN` does, by field.
OTHERS: dict[str, Any] = {
    "generation": 2,
    "shipment": Shipment(digest=b"f", arguments=b"a"),
    "rows": (3, 1),
    "gradient_reduce_op": ReduceOp.SUM,
    "stand_in": False,
    "seed": (1, 1),
    "check_in_sync": 5,
    "on_nonfinite": "skip",
    "summaries": SummaryOrder("writer", 3),
    "random": ((b"x",),),
    "looks_only": True,
}


def numbered(headers: list[StepHeader], first: int = 4) -> list[StepHeader]:
    return [dataclasses.replace(header, step=first + place) for place, header in enumerate(headers)]


@given(st.lists(st.sampled_from([PLAIN, *(dataclasses.replace(PLAIN, **{name: OTHERS[name]}) for name in OTHERS)])))
def test_headers_are_read_back_as_they_were(kinds: list[StepHeader]) -> None:
    headers = numbered(kinds)
    assert unpack_headers(pack_headers(headers)) == headers


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_said(name: str) -> None:
    other = dataclasses.replace(PLAIN, **{name: OTHERS[name]})
    headers = numbered([PLAIN, PLAIN, other, other, PLAIN])
    assert len(pickle.loads(pack_headers(headers))) == 3
    assert unpack_headers(pack_headers(headers)) == headers


@pytest.mark.parametrize("field", [column.name for column in dataclasses.fields(Shipment)])
def test_each_part_of_a_shipment_that_travels_is_compared(field: str) -> None:
    if field in ("per_replica", "contents"):
        return  # these stay with the driver
    value: Any = {"released": (3,), "forget": (b"x",)}.get(field, b"x")
    headers = numbered([PLAIN, dataclasses.replace(PLAIN, shipment=Shipment(**{"digest": b"f", field: value}))])
    assert unpack_headers(pack_headers(headers)) == headers


def test_steps_that_do_not_follow_each_other_keep_their_numbers() -> None:
    headers = [dataclasses.replace(PLAIN, step=step) for step in (4, 5, 7, 7, 8, 2)]
    assert unpack_headers(pack_headers(headers)) == headers


def test_a_loop_s_steps_take_hardly_more_than_one() -> None:
    assert len(pack_headers(numbered([PLAIN] * 16))) < len(pack_headers([PLAIN])) + 8
