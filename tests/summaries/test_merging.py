from __future__ import annotations

from raydist.summaries.merging import merge
from raydist.summaries.record import Record
from raydist.summaries.said_once import Text
from tests.summaries.records import record_of


def brief(records: list[Record]) -> list[tuple[str, int, object]]:
    return [(record.name, record.step, getattr(record.shown, "value", record.shown)) for record in records]


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
