from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.sources.record_slot import RecordSlot
from tests.pipelines.sources.lists import ListReader

ITEMS: list[bytes | Exception] = [b"a", b"bb", ValueError("x"), b"c", b"d", b"e"]


def slot(items: Sequence[bytes | Exception], position: tuple[int, int, int] = (0, 0, 0), *, ahead: bool) -> RecordSlot:
    return RecordSlot(lambda path, offset, index: ListReader(items, offset, index), 7, "path", position, ahead=ahead)


def drain(source: RecordSlot, limit: int) -> list[Any]:
    found: list[Any] = []
    while True:
        records, error = source.read(limit)
        if not len(records) and error is None:
            assert source.ended
            source.close()
            return found
        found += records.tolist() if error is None else [error]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 10])
def test_all_records_and_errors_in_order(ahead: bool, limit: int) -> None:
    assert drain(slot(ITEMS, ahead=ahead), limit) == ITEMS
    assert drain(slot([], ahead=ahead), limit) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_goes_on_at_every_state(ahead: bool) -> None:
    for done in range(len(ITEMS) + 1):
        first = slot(ITEMS, ahead=ahead)
        for _ in range(done):
            first.read(1)
        number, *position = first.state()
        first.close()
        resumed = slot(ITEMS, (position[0], position[1], position[2]), ahead=ahead)
        assert resumed.state() == [number, *position]
        assert drain(resumed, 2) == ITEMS[done:]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_state_behind_the_end_is_the_end(ahead: bool) -> None:
    assert drain(slot(ITEMS[:2], (0, 0, 5), ahead=ahead), 3) == []


def test_records_at_hand_are_taken_without_waiting() -> None:
    source = slot([b"a", b"b", b"c"], ahead=True)
    assert source.ready() == 0
    assert source.read(1)[0].tolist() == [b"a"]
    assert source.ready() == 2
    assert source.take(5).tolist() == [b"b", b"c"]
    assert drain(source, 1) == []


def test_an_error_in_the_place_of_the_name() -> None:
    error = ValueError("no name")
    source = RecordSlot(lambda *_: ListReader([]), 0, ElementError(error), ahead=True)
    source.start()
    assert source.read(3)[1] is error
    assert source.ended
    source.close()
