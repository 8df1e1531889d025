"""Replicas agree on what they wrote to a buffer when a batch is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from raydist.collectives.differentiable import all_gather
from raydist.replicas.in_sync import WrittenBuffers
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks


def agreed(
    write: Callable[[torch.Tensor, int], Any], how: str, value: Any, present: tuple[bool, ...] = (True, True)
) -> list[Any]:
    """What each replica holds after `write(buffer, rank)`."""

    def main(group: LocalGroup) -> Any:
        buffer = torch.tensor(value)
        written = WrittenBuffers(lambda: [(buffer, how)], lambda tensor: all_gather(group, tensor, 0))
        written.begin()
        write(buffer, group.rank)
        written.agree(present)
        return buffer.tolist()

    return run_ranks(len(present), main)


# tf.distribute's table of variables that are aggregated on writing: replicas assign 1 and 2, or add them to 10.
@pytest.mark.parametrize(("how", "assigned", "added"), [("sum", 3.0, 13.0), ("mean", 1.5, 11.5), ("first", 1.0, 11.0)])
def test_written_in_a_step(how: str, assigned: float, added: float) -> None:
    assert agreed(lambda buffer, rank: buffer.fill_(rank + 1.0), how, 0.0) == [assigned] * 2
    assert agreed(lambda buffer, rank: buffer.add_(rank + 1.0), how, 10.0) == [added] * 2


@pytest.mark.parametrize("how", ["sum", "mean", "first"])
def test_a_batch_in_which_nobody_writes_changes_nothing(how: str) -> None:
    held = torch.tensor([0.1, 1e30]).tolist()
    assert agreed(lambda buffer, rank: None, how, held) == [held] * 2


@pytest.mark.parametrize(("how", "expected"), [("sum", 15), ("first", 12)])
def test_who_has_no_rows_does_not_count(how: str, expected: int) -> None:
    found = agreed(lambda buffer, rank: buffer.add_(rank + 1), how, 10, present=(False, True, True))
    assert found == [expected] * 3


def test_small_integers_add_up() -> None:
    def main(group: LocalGroup) -> Any:
        buffer = torch.tensor(200, dtype=torch.uint8)
        written = WrittenBuffers(lambda: [(buffer, "sum")], lambda tensor: all_gather(group, tensor, 0))
        written.begin()
        buffer.sub_(group.rank)
        written.agree((True, True, True))
        return buffer.item()

    assert run_ranks(3, main) == [197, 197, 197]


def test_without_such_buffers_nothing_is_exchanged() -> None:
    written = WrittenBuffers(lambda: [], lambda _: pytest.fail("a collective"))
    written.begin()
    written.agree((True,))
