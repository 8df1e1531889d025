from __future__ import annotations

from dataclasses import dataclass
from typing import final

import pytest

from raydist.collectives.shared_memory.task import Condition, Steps, Task
from raydist.errors import CollectiveMismatchError


@final
@dataclass
class Switch(Condition):
    on: bool = False
    last: bool = False

    def met(self) -> bool:
        return self.on

    def missing(self) -> tuple[int, ...]:
        return () if self.on else (1,)


def test_a_task_goes_as_far_as_it_can() -> None:
    first, second = Switch(on=True), Switch()
    done: list[int] = []

    def steps() -> Steps:
        done.append(0)
        yield first
        done.append(1)
        yield second
        done.append(2)

    task = Task("work", steps())
    assert done == []
    task.advance()
    task.advance()
    assert (done, task.done, task.awaited) == ([0, 1], False, second)
    second.on = True
    task.advance()
    task.advance()
    assert (done, task.done, task.awaited, task.error) == ([0, 1, 2], True, None, None)


def failing(error: Exception) -> Steps:
    yield Switch(on=True)
    raise error


def test_a_mismatch_is_kept_for_whoever_waits() -> None:
    task = Task("work", failing(CollectiveMismatchError("differ")))
    task.advance()
    assert task.done
    assert isinstance(task.error, CollectiveMismatchError)


def test_what_must_not_happen_is_raised_at_once() -> None:
    task = Task("work", failing(MemoryError("full")))
    with pytest.raises(MemoryError):
        task.advance()
    assert task.done
    task.advance()


def test_a_dropped_task_does_nothing_more() -> None:
    switch = Switch()
    task = Task("work", (condition for condition in [switch]))
    task.advance()
    task.drop()
    switch.on = True
    task.advance()
    assert not task.done
