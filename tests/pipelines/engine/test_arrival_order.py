from __future__ import annotations

import json
import random

from raydist.pipelines.engine.arrival_order import ArrivalOrder, ArrivalOrders


def note(order: ArrivalOrder, sizes: list[int], numbers: list[int]) -> None:
    for number, size in enumerate(sizes):
        order.was_read(number, size)
    for given, number in enumerate(numbers):
        order.was_given(given, number)


def test_notes_since_a_state_survive_a_file() -> None:
    order = ArrivalOrder()
    note(order, [1, 64, 64, 64, 7], [0, 2, 3, 1, 4])
    notes = json.loads(json.dumps(order.since(1, 1)))
    assert notes == [1, [[64, 3], [7, 1]], 1, [[1, 2], [-2, 1], [0, 1]]]
    again = ArrivalOrder.parse(notes)
    assert [again.size_of(number) for number in range(1, 6)] == [64, 64, 64, 7, None]
    assert [again.number_at(given) for given in range(1, 6)] == [2, 3, 1, 4, None]


def test_what_is_followed_is_not_noted_twice() -> None:
    order = ArrivalOrder()
    for _ in range(2):
        note(order, [3, 3], [1, 0])
    assert order.since(0, 0) == [0, [[3, 2]], 0, [[1, 1], [-1, 1]]]


def test_the_oldest_state_of_each_stage_counts() -> None:
    orders = ArrivalOrders()
    note(orders.of("map-1@0"), [5] * 4, [0, 1, 2, 3])
    note(orders.of("map-3@0"), [5] * 4, [1, 0, 3, 2])
    old = {"order": "map-1@0", "first": 1, "given": 1, "input": {}}
    state = {"at": {"order": "map-3@0", "first": 2, "given": 2, "input": {"at": old}}, "parts": [old | {"first": 3}]}
    notes = orders.since(state)
    assert notes == {"map-3@0": [2, [[5, 2]], 2, [[1, 1], [-1, 1]]], "map-1@0": [1, [[5, 3]], 1, [[0, 3]]]}
    orders.load(notes)
    assert orders.since(state) == notes
    assert orders.since({"skip": 3}) == {}


def test_a_state_in_one_pass_keeps_the_notes_of_later_passes() -> None:
    orders = ArrivalOrders()
    for name in ("map-1@0.0", "map-3@0.0", "map-1@0.1", "map-1@0.2"):
        note(orders.of(name), [5, 4], [1, 0])
    state = {"order": "map-1@0.1", "first": 1, "given": 1}
    notes = orders.since(state)
    assert notes == {"map-1@0.1": [1, [[4, 1]], 1, [[-1, 1]]], "map-1@0.2": [0, [[5, 1], [4, 1]], 0, [[1, 1], [-1, 1]]]}
    again = ArrivalOrders()
    again.load(notes)
    assert again.since(state) == notes


def test_long_notes_are_short() -> None:
    order = ArrivalOrder()
    note(order, [64] * 100_000, list(range(100_000)))
    assert len(json.dumps(order.since(0, 0))) < 50


def test_notes_of_thousands_of_turns_fit_into_a_state() -> None:
    orders, draw = ArrivalOrders(), random.Random(0)
    numbers = [given + draw.choice([0, 0, 0, 1, 2, 3]) for given in range(5000)]
    note(orders.of("interleave-1@0"), [1] * 5000, numbers)
    notes = orders.since({"order": "interleave-1@0", "first": 0, "given": 0})
    assert len(json.dumps(notes)) < 4_000
    again = ArrivalOrders()
    again.load(notes)
    assert [again.of("interleave-1@0").number_at(given) for given in range(5000)] == numbers
