"""A rank that is killed, stopped, late or gives up, inside every operation of a group in shared memory."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raydist.collectives.base import Communicator, Work
from raydist.errors import CancelledError, DeadlineExceededError, RaydistError, UnavailableError
from raydist.values import ReduceOp
from tests.collectives.processes import ProcessTeam
from tests.collectives.shared_memory.ranks import run_sharing
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(180)

LARGE = 300_000
"""Elements of a tensor that passes window by window."""
VICTIM = 2


def small(communicator: Communicator) -> Work:
    return communicator.all_reduce(torch.ones(3), ReduceOp.SUM)


def staged(communicator: Communicator) -> Work:
    return communicator.all_reduce(torch.ones(LARGE), ReduceOp.MEAN)


def reduced(communicator: Communicator) -> Work:
    return communicator.reduce(torch.ones(LARGE), 0, ReduceOp.SUM)


def scattered(communicator: Communicator) -> Work:
    inputs = [torch.ones(LARGE) for _ in range(communicator.world_size)]
    return communicator.reduce_scatter(torch.ones(LARGE), inputs, ReduceOp.SUM)


def gathered(communicator: Communicator) -> Work:
    return communicator.all_gather([torch.ones(LARGE) for _ in range(communicator.world_size)], torch.ones(LARGE))


def told(communicator: Communicator) -> Work:
    return communicator.broadcast(torch.ones(LARGE), VICTIM)


def received(communicator: Communicator) -> Work:
    """From the victim, which never sends."""
    return communicator.recv(torch.ones(3), VICTIM)


def sent(communicator: Communicator) -> Work:
    """More than fits a mailbox, to the victim, which never receives."""
    return communicator.send(torch.ones(LARGE), VICTIM)


OPERATIONS = (small, staged, reduced, scattered, gathered, told, received, sent)
operations = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)


class Failing:
    """Seconds until an operation failed, and how."""

    def __init__(self, operation: Callable[[Communicator], Work]) -> None:
        self.operation = operation

    def __call__(self, communicator: Communicator) -> tuple[float, RaydistError]:
        start = time.monotonic()
        with pytest.raises(RaydistError) as caught:
            self.operation(communicator).wait()
        return time.monotonic() - start, caught.value


class Entering:
    """Enter an operation, and do not come back to it."""

    def __init__(self, operation: Callable[[Communicator], Work]) -> None:
        self.operation = operation

    def __call__(self, communicator: Communicator) -> None:
        if self.operation not in (received, sent):
            self.operation(communicator)


def stop_myself(communicator: Communicator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class AbortingSoon(Failing):
    """Give up from another thread, in the middle of the operation."""

    def __call__(self, communicator: Communicator) -> tuple[float, RaydistError]:
        timer = threading.Timer(0.1, communicator.abort)
        timer.start()
        outcome = super().__call__(communicator)
        timer.join()
        return outcome


@operations
@pytest.mark.parametrize("entered", [False, True])
def test_a_killed_rank_is_named_at_once(
    shm_team: ProcessTeam, operation: Callable[[Communicator], Work], entered: bool
) -> None:
    shm_team.reform()
    if entered and operation is not small:  # what it has brought to a small one, all have
        shm_team.begin({VICTIM: Entering(operation)})()
    outcomes = shm_team.begin(dict.fromkeys((0, 1), Failing(operation)))
    time.sleep(0.2)
    killed = time.monotonic()
    shm_team.kill(VICTIM)
    results = outcomes()
    took = time.monotonic() - killed
    for _, error in results.values():
        assert isinstance(error, UnavailableError)
        assert f"rank {VICTIM} is gone" in str(error)
    assert took < 1.0  # 0.05 s where nobody else wants the cores
    shm_team.reform()
    contract.check_asynchronous(shm_team)


@operations
def test_a_stopped_rank_is_named_when_the_limit_is_over(
    shm_team: ProcessTeam, operation: Callable[[Communicator], Work]
) -> None:
    shm_team.reform()
    resumed = shm_team.begin({VICTIM: stop_myself})
    outcomes = shm_team.begin(dict.fromkeys((0, 1), Failing(operation)))()
    shm_team.resume(VICTIM)
    assert resumed() == {VICTIM: None}
    for seconds, error in outcomes.values():
        assert isinstance(error, DeadlineExceededError)
        assert f"No sign of rank {VICTIM}" in str(error)
        assert seconds < shm_team.timeout_s + 2.0
    shm_team.reform()
    contract.check_asynchronous(shm_team)


@operations
def test_an_abort_wakes_everybody(shm_team: ProcessTeam, operation: Callable[[Communicator], Work]) -> None:
    shm_team.reform()
    outcomes = shm_team.begin({0: Failing(operation), 1: AbortingSoon(operation)})()
    for seconds, error in outcomes.values():
        assert isinstance(error, CancelledError)
        assert "rank 1 aborted group" in str(error)
        assert seconds < shm_team.timeout_s * 0.9
    shm_team.reform()
    contract.check_asynchronous(shm_team)


def late(communicator: Communicator) -> float:
    time.sleep(0.3)
    return whole_round(communicator)


def whole_round(communicator: Communicator) -> float:
    """Every operation once; the number of elements that are as they should be."""
    rank, size = communicator.rank, communicator.world_size
    tensor = torch.ones(LARGE)
    communicator.all_reduce(tensor, ReduceOp.SUM).wait()
    (shared,) = communicator.allocate([(LARGE, torch.float32)])
    communicator.all_reduce(shared.fill_(1.0), ReduceOp.SUM).wait()
    output = torch.zeros(LARGE)
    communicator.reduce_scatter(output, [torch.ones(LARGE)] * size, ReduceOp.SUM).wait()
    outputs = [torch.zeros(LARGE) for _ in range(size)]
    communicator.all_gather(outputs, torch.full((LARGE,), float(size))).wait()
    got = torch.zeros(LARGE)
    sending = communicator.send(torch.full((LARGE,), float(size)), (rank + 1) % size)
    communicator.recv(got, (rank - 1) % size).wait()
    sending.wait()
    return torch.stack([tensor, shared, output, *outputs, got]).eq(size).sum().item()


def test_a_late_rank_is_waited_for(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    results = shm_team.begin({0: whole_round, 1: late, 2: whole_round})()
    assert results == dict.fromkeys(range(3), LARGE * 7)


def cpu_seconds_while_waiting(communicator: Communicator) -> float:
    before = time.process_time()
    communicator.all_reduce(torch.ones(3), ReduceOp.SUM).wait()
    return time.process_time() - before


def sleep_first(communicator: Communicator) -> None:
    time.sleep(0.5)
    communicator.all_reduce(torch.ones(3), ReduceOp.SUM).wait()


def test_waiting_takes_no_cpu(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    results = shm_team.begin({0: cpu_seconds_while_waiting, 1: cpu_seconds_while_waiting, 2: sleep_first})()
    assert max(results[0], results[1]) < 0.1


def number_of_threads(communicator: Communicator) -> tuple[int, int]:
    before = threading.active_count()
    whole_round(communicator)
    return before, threading.active_count()


def test_nothing_runs_in_the_background(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    assert all(before == after for before, after in shm_team.run(number_of_threads))


def what_is_held() -> set[str]:
    """Segments of which this process has a descriptor or a mapping."""
    gc.collect()
    descriptors = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mappings = Path("/proc/self/maps").read_text().split()
    return {name for name in (*descriptors, *mappings) if "raydist-shm" in name}


def test_close_leaves_nothing() -> None:
    # That no file is left, the fixture of all tests sees to.
    before = what_is_held()
    assert run_sharing(3, whole_round) == [LARGE * 7] * 3
    assert what_is_held() <= before


def number_held(communicator: Communicator) -> int:
    return len(what_is_held())


def test_a_new_generation_leaves_nothing_of_the_last(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    shm_team.run(whole_round)
    first = shm_team.run(number_held)
    for _ in range(3):
        shm_team.reform()
        shm_team.run(whole_round)
    assert shm_team.run(number_held) == first
