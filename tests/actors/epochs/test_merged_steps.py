"""Steps of several workers as one. That random ones are right: `tests/distributed_dataset/test_sharding.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from raydist.actors.epochs.batch_group import StepBatch
from raydist.actors.epochs.batch_queues import QueueEntry
from raydist.actors.epochs.merged_epoch import MergedSteps
from raydist.core.errors import SpecError, UnavailableError
from raydist.core.nest import flatten
from tests.actors.epochs.entries import end_entry, error_entry, group_entry


def merged(*feeds: Sequence[QueueEntry], replicas: int = 1) -> MergedSteps:
    steps = MergedSteps([{"at": 0, "step": 0}] * len(feeds), replicas)
    for worker, entries in enumerate(feeds):
        steps.add(worker, entries)
    return steps


def everything(steps: MergedSteps) -> list[QueueEntry]:
    found = []
    while (entry := steps.next_entry()) is not None:
        found.append(entry)
        if entry.last:
            break
    return found


def rows(entry: QueueEntry, *, padding: bool = False) -> list[list[Any]]:
    """Of each step, of each replica."""
    group = entry.group
    assert group is not None
    batches = [StepBatch(group, place) for place in range(len(group.rows))]
    ranks = range(len(group.refs))
    return [
        [group.refs[rank].leaf(0, batch.place_on(rank, padding=padding)).tolist() for rank in ranks]
        for batch in batches
    ]


def test_groups_of_any_size_meet() -> None:
    first = [group_entry(0, [[[0]], [[1]], [[2]]]), end_entry(3)]
    second = [group_entry(0, [[[10]]]), group_entry(1, [[[11]], [[12]]]), end_entry(3)]
    one, more, end = everything(merged(first, second))
    assert rows(one) == [[[0], [10]]]
    assert rows(more) == [[[1], [11]], [[2], [12]]]
    assert (more.number, more.group and more.group.step, more.group and more.group.rows) == (1, 1, ((1, 1), (1, 1)))
    assert (end.number, end.last) == (3, True)
    assert [state["steps"] for state in (*one.states, *more.states)] == [[1, 1], [2, 2], [3, 3]]
    assert [state["step"] for state in (*one.states, *more.states)] == [1, 2, 3]


def test_it_says_who_is_missing() -> None:
    steps = merged([group_entry(0, [[[0]]])], [])
    assert steps.missing() == [1]
    assert steps.next_entry() is None
    steps.add(1, [end_entry(0)])
    assert steps.next_entry() is not None
    assert steps.missing() == [0]
    assert (steps.asks_from(0), steps.holds_last(0), steps.holds_last(1)) == (1, False, True)


def test_a_worker_without_data_borrows_the_rows_of_another() -> None:
    first = [end_entry(0)]
    second = [group_entry(0, [[[10, 11, 12], []], [[13], []], [[], [14]]]), end_entry(3)]
    one, two, end = everything(merged(first, second, replicas=2))
    assert rows(one) == [[[], [], [10, 11, 12], []], [[], [], [13], []]]
    assert rows(one, padding=True) == [[[10, 11], [10, 11], [10, 11, 12], [-1]], [[13], [13], [13], [-1]]]
    assert rows(two) == [[[], [], [], [14]]]  # who lends must have rows
    assert rows(two, padding=True) == [[[14], [14], [-1], [14]]]
    assert one.group is not None
    assert one.group.rows == ((0, 0, 3, 0), (0, 0, 1, 0))
    assert end.last


def test_a_step_in_which_nobody_has_rows_is_passed_over() -> None:
    first = [group_entry(0, [[[0]], [[]], [[]], [[3]]]), end_entry(4)]
    second = [group_entry(0, [[[]], [[]], [[12]], [[]]]), end_entry(4)]
    entries = everything(merged(first, second))
    assert [rows(entry) for entry in entries[:-1]] == [[[[0], []]], [[[], [12]], [[3], []]]]
    assert entries[1].number == 1
    assert entries[1].states[0]["steps"] == [3, 3]


def test_an_error_has_a_place_of_its_own_and_the_others_wait() -> None:
    first = [error_entry(0, ValueError("bad")), group_entry(1, [[[1]]]), end_entry(2)]
    second = [group_entry(0, [[[10]]]), end_entry(1)]
    error, step, end = everything(merged(first, second))
    assert error.error is not None
    assert isinstance(error.error.restore(), ValueError)
    assert not error.last
    assert rows(step) == [[[1], [10]]]
    assert end.last


def test_after_a_fatal_error_nothing_follows() -> None:
    first = [error_entry(0, UnavailableError("gone"), last=True)]
    (entry,) = everything(merged(first, [group_entry(0, [[[10]]])]))
    assert entry.last
    assert entry.error is not None


def test_workers_must_make_the_same_elements() -> None:
    named = flatten({"x": 1})[1]
    (entry,) = everything(merged([group_entry(0, [[[0]]])], [group_entry(0, [[[1]]], named)]))
    assert entry.last
    assert entry.error is not None
    with pytest.raises(SpecError, match=r"same structure, but their leaves are \[''\] and \['x'\]"):
        raise entry.error.restore()


def test_each_worker_learns_how_far_the_readers_are() -> None:
    first = [group_entry(0, [[[0]], [[]], [[2]], [[3]]]), end_entry(4)]
    second = [group_entry(0, [[[10]], [[]]]), end_entry(2)]
    steps = merged(first, second)
    assert steps.done_by(0) == (0, 0)
    everything(steps)  # places 0 | 1, 2 | the end; place 1 of the workers was passed over
    assert [steps.done_by(done) for done in range(4)] == [(0, 0), (2, 3), (3, 3), (5, 3)]
