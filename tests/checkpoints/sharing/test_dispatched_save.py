"""Waiting for replicas that save, without replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.sharing.dispatched_save import DispatchedSave
from raydist.checkpoints.sharing.shares import Share
from raydist.errors import CancelledError, DeadlineExceededError


class Group:
    """Answers as replicas would, one list a question; the last one for good."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.answers = list(answers)
        self.num_asked = 0

    def ask(self) -> Sequence[Any]:
        self.num_asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def save(group: Group, limit_s: float = 10.0) -> DispatchedSave:
    return DispatchedSave(group.ask, limit_s)


def test_it_waits_until_all_have_written() -> None:
    group = Group([None, None], [Share({}), None], [Share({}), Share({})])
    waiting = save(group)
    assert not waiting.is_done
    assert waiting.wait() == [Share({}), Share({})]
    assert waiting.is_done
    assert group.num_asked == 3


def test_the_error_that_caused_the_others_is_raised() -> None:
    consequence, cause = pack_error(CancelledError("given up")), pack_error(ValueError("bad row"))
    with pytest.raises(ValueError, match="bad row"):
        save(Group([consequence, None], [consequence, cause])).wait()
    with pytest.raises(CancelledError, match="given up"):
        save(Group([consequence, Share({})])).wait()


def test_a_wait_has_a_limit() -> None:
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 s, but 1 of 2 replicas have not"):
        save(Group([None, Share({})]), 0.01).wait()
