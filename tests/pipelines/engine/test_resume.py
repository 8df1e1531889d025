from __future__ import annotations

import pytest

from raydist.core.errors import UnavailableError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.resume import Outbox, read_items
from raydist.pipelines.run.plan import open_iterator

ERROR = ElementError(ValueError("bad"))


def items() -> list[Item]:
    return [block_of_rows([1, 2, 3]), ERROR, block_of_rows([4, 5])]


def plain(parts: list[Item]) -> list[object]:
    return [x for part in parts for x in (part.rows() if isinstance(part, Block) else ["error"])]


def test_reading_takes_errors_as_items_but_not_those_of_the_machinery() -> None:
    def fails(x: int) -> int:
        if x == 4:
            raise UnavailableError("gone")
        return 2 // int(x)

    dataset = Dataset.range(9).map(fails)
    source = open_iterator(dataset._op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())
    assert plain(read_items(source, 3)) == ["error", 2, 1]
    with pytest.raises(UnavailableError):
        read_items(source, 3)


class TestOutbox:
    def test_state_is_the_last_border_and_what_was_handed_out_since(self) -> None:
        outbox = Outbox({"n": 0})
        outbox.put(items(), {"n": 1})
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

    def test_blocks_come_together_as_far_as_they_fit_whole_and_up_to_an_error(self) -> None:
        outbox = Outbox({"n": 0})
        one, two = block_of_rows([1]), block_of_rows([2, 3])
        outbox.put([one, one, two, ERROR], {"n": 1})
        outbox.put([two], {"n": 2})
        assert plain([*outbox.take_together(3)]) == [1, 1]
        assert outbox.state_dict() == {"at": {"n": 0}, "skip": 2}
        assert plain([*outbox.take_together(1)]) == [2], "more than fits is cut, as by take"
        assert plain([*outbox.take_together(9)]) == [3]
        with pytest.raises(ValueError, match="bad"):
            outbox.take_together(9)
        assert outbox.state_dict() == {"at": {"n": 1}, "skip": 0}
        assert plain([*outbox.take_together(9)]) == [2, 3]
        assert outbox.state_dict() == {"at": {"n": 2}, "skip": 0}

    def test_groups_without_items_move_the_border(self) -> None:
        outbox = Outbox({"n": 0})
        outbox.put([], {"n": 1})
        assert outbox.state_dict() == {"at": {"n": 1}, "skip": 0}

    def test_items_made_again_are_dropped_in_groups_of_any_size(self) -> None:
        outbox = Outbox({"n": 0})
        assert outbox.load_state_dict({"at": {"n": 5}, "skip": 4}) == {"n": 5}
        assert outbox.state_dict() == {"at": {"n": 5}, "skip": 4}
        outbox.put([block_of_rows([1, 2, 3])], {"n": 6})
        assert not outbox
        outbox.put([ERROR, block_of_rows([4, 5])], {"n": 7})
        assert outbox.state_dict() == {"at": {"n": 6}, "skip": 1}
        assert outbox.take(9).rows() == [4, 5]
