"""What readers see of an epoch, whoever makes its entries."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.actors.epochs.batch_queues import QueueEntry
from raydist.actors.epochs.served_epoch import Poll, ServedEpoch
from raydist.core.errors import CancelledError
from raydist.pipelines.metering.stats import PipelineStats


class Failing(ServedEpoch):
    """Offers one entry and fails; counts what it is told."""

    def __init__(self) -> None:
        self.news = 0
        super().__init__(2, {"at": 0}, "a test")

    def _run(self) -> None:
        self._offer(({"at": 1},), last=False)
        self._fail(ValueError("bad"), "In a test.")

    def _acknowledged(self) -> None:
        self.news += 1

    def poll(self, poll: Poll) -> tuple[QueueEntry, ...]:
        with self._changed:
            self._changed.wait_for(lambda: self._queues.ready(poll.start), poll.wait_s)
            return self._queues.take(poll.rank, poll.start)

    def stats(self) -> PipelineStats:
        return PipelineStats()


@pytest.fixture
def served() -> Any:
    made = Failing()
    made.start()
    assert made.join(5.0)
    return made


def test_a_poll_says_how_long_its_reader_can_wait() -> None:
    assert Poll(None, 5, 3, 1.0, pace_s=0.5).has_work_s == 1.0
    assert Poll(None, 5, 3, 1.0).has_work_s == 0.0


def test_nothing_follows_a_failure(served: Failing) -> None:
    first, failed = served.poll(Poll(None, 0, 0, 1.0))
    assert (first.states, failed.number, failed.last) == (({"at": 1},), 1, True)
    assert failed.error is not None
    assert failed.error.restore().__notes__ == ["In a test."]


def test_all_news_are_told(served: Failing) -> None:
    served.acknowledge(0, 1)
    served.lend(1)
    served.release(1, 1)
    assert served.news == 3
    assert served.in_use
    assert served.reclaim().number == 1
    assert served.news == 4
    assert not served.in_use
    assert served.position_of(1).state == {"at": 1}
    assert served.num_kept() == 1


def test_a_closed_pass_gives_nothing(served: Failing) -> None:
    served.close()
    with pytest.raises(CancelledError, match="closed"):
        served.poll(Poll(None, 0, 0, 1.0))
