"""Handles of the driver's and of a replica's objects."""

from __future__ import annotations

import gc

from raydist.mirroring.handles import DriverTable, ReplicaTable


class Thing:
    pass


def test_driver_table_holds_nothing_alive() -> None:
    table = DriverTable()
    keep, drop = Thing(), Thing()
    table.add(keep, table.reserve())
    table.add(drop, table.reserve())
    assert [table.handle_of(keep), table.handle_of(drop)] == [1, 2]
    del drop
    gc.collect()
    assert list(table.objects()) == [(1, keep)]
    assert table.object_of(2) is None
    assert table.released == (2,)
    assert table.take_released(1) == [2]
    assert not table.released


def test_driver_handles_are_never_used_twice() -> None:
    table = DriverTable()
    handles = []
    for _ in range(3):
        thing = Thing()
        handles.append(table.reserve())
        table.add(thing, handles[-1])
        del thing
    assert handles == [1, 2, 3]


def test_driver_remove_and_clear_release_nothing() -> None:
    table = DriverTable()
    things = [Thing(), Thing()]
    for thing in things:
        table.add(thing, table.reserve())
    table.remove(1)
    assert table.handle_of(things[0]) is None
    table.clear()
    things.clear()
    gc.collect()
    assert table.released == ()


def test_replica_table() -> None:
    table = ReplicaTable()
    second, first = Thing(), Thing()
    table.add(2, second)
    table.add(1, first)
    assert table.items() == [(1, first), (2, second)]
    assert table.handle_of(first) == 1
    table.release(1)
    table.release(7)
    assert table.handle_of(first) is None
    assert table.object_of(2) is second
