from __future__ import annotations

import torch

from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.worker.slices import ReadVersions, SliceTable


def part(number: int, handle: int, begin: int) -> ServedSlice:
    return ServedSlice(number, handle, "v", 0, begin, (2,), torch.float32)


def test_slices_come_in_the_order_of_their_rows_and_once() -> None:
    table = SliceTable()
    assert table.add([part(3, 7, 2), part(4, 7, 0), part(5, 8, 0)]) == [7, 8]
    assert [each.number for each in table.of(7)] == [4, 3]
    assert table.add([part(9, 7, 0)]) == []
    assert (7 in table, 9 in table, table.handles()) == (True, False, [7, 8])
    assert [each.number for each in table.forget(8)] == [5]
    assert table.forget(8) == ()


def test_a_change_of_ones_own_leaves_all_else_as_new_as_it_was() -> None:
    read = ReadVersions()
    read.add([1, 2, 3])
    assert read.older_than(0) == [1, 2, 3]
    read.note([1, 2, 3], 5)
    read.note_change([1], 6)
    assert read.older_than(6) == []
    read.note_change([1], 8)  # somebody else made version 7
    assert (read.older_than(8), read.newest) == ([2, 3], 8)
    assert (read.oldest([1]), read.oldest([1, 2]), read.oldest([])) == (8, 6, 8)
    read.forget()
    assert read.older_than(0) == [1, 2, 3]
    read.drop([1, 2])
    assert read.older_than(0) == [3]
    assert read.newest == 8


def test_what_was_older_does_not_become_newer() -> None:
    read = ReadVersions()
    read.note([1], 5)
    read.note([2], 7)
    read.note_change([2], 8)
    assert read.older_than(8) == [1]


def test_some_are_forgotten_and_a_version_is_asked_for() -> None:
    read = ReadVersions()
    read.note([1, 2], 5)
    read.forget([2, 3])
    assert (read.older_than(5), read.newest) == ([2, 3], 5)
    assert (read.is_of(1, 5), read.is_of(1, 4), read.is_of(2, 5), read.is_of(9, 5)) == (True, False, False, False)
