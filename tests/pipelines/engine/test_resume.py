"""States of operations: items handed out since the last small position."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raydist.core.errors import FailedPreconditionError
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine.producers import Producer, ReplayIterator
from raydist.pipelines.engine.resume import Outbox

ERROR = ElementError(ValueError("bad"))


def test_a_state_is_the_last_border_and_what_was_handed_out_since() -> None:
    outbox = Outbox({"n": -1})
    outbox.put([], {"n": 0})
    assert outbox.state_dict() == {"at": {"n": 0}, "skip": 0}, "groups without items move the border"
    outbox.put([block_of_rows([1, 2, 3]), ERROR, block_of_rows([4, 5])], {"n": 1})
    outbox.put([block_of_rows([6])], {"n": 2})
    assert outbox.take(2).rows() == [1, 2]
    assert outbox.state_dict() == {"at": {"n": 0}, "skip": 2}
    assert outbox.take(9).rows() == [3]
    with pytest.raises(ValueError, match="bad"):
        outbox.take(1)
    assert outbox.take(9).rows() == [4, 5]
    assert outbox.state_dict() == {"at": {"n": 1}, "skip": 0}
    assert outbox.take(9).rows() == [6]
    assert not outbox
    assert outbox.state_dict() == {"at": {"n": 2}, "skip": 0}


def test_items_made_again_are_dropped_in_groups_of_any_size() -> None:
    outbox = Outbox({"n": 0})
    assert outbox.load_state_dict({"at": {"n": 5}, "skip": 4}) == {"n": 5}
    assert outbox.state_dict() == {"at": {"n": 5}, "skip": 4}
    outbox.put([block_of_rows([1, 2, 3])], {"n": 6})
    assert not outbox
    outbox.put([ERROR, block_of_rows([4, 5])], {"n": 7})
    assert outbox.state_dict() == {"at": {"n": 6}, "skip": 1}
    assert outbox.take(9).rows() == [4, 5]


class Pairs(Producer):
    """Groups of two numbers with an error between them, `groups` times."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._made = 0

    def make(self, limit: int) -> Sequence[Item]:
        if self._made == self._groups:
            raise StopIteration
        self._made += 1
        base = 10 * self._made
        return [block_of_rows([base]), ElementError(ValueError(base)), block_of_rows([base + 1])]

    def close(self) -> None:
        self._made = self._groups


def read(iterator: ReplayIterator) -> list[int | str]:
    items: list[int | str] = []
    while True:
        try:
            items += iterator.next_block(5).columns[0].tolist()
        except StopIteration:
            return items
        except ValueError as error:
            items.append(str(error))


def test_a_replay_passes_over_what_was_handed_out() -> None:
    everything: list[int | str] = [10, "10", 11, 20, "20", 21]
    assert read(ReplayIterator(Pairs(2))) == everything
    for done in range(7):
        resumed = ReplayIterator(Pairs(2))
        resumed.load_state_dict({"items": done})
        assert resumed.state_dict() == {"items": done}
        assert read(resumed) == everything[done:]


def test_a_shorter_input_is_an_error() -> None:
    resumed = ReplayIterator(Pairs(1))
    resumed.load_state_dict({"items": 5})
    with pytest.raises(FailedPreconditionError, match="after 5 elements, but it ended 2 earlier"):
        resumed.next_block(1)
