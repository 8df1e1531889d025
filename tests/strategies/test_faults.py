"""A replica, a child or a program that dies leads to an error that names it, never to a hang or to leftovers."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from tests.forks import in_a_forked_child
from tests.ray_head import ray_home
from tests.shared_files import left_behind, shared_files
from tests.watched_program import TOO_LONG, WatchedProgram

pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]
LONG = pytest.mark.long

TwoReplicas = rd.MirroredStrategy | rd.CentralStorageStrategy


@pytest.fixture
def strategy(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[TwoReplicas]:
    """A strategy of its own, for tests that break it; a mirrored one of two where they name none."""
    make, number = getattr(request, "param", (rd.MirroredStrategy, 2))
    limits = rd.Timeouts(start_s=60, collective_s=5, step_s=60, close_s=5)
    never = rd.FailureOptions(recover=False)
    made: TwoReplicas = make(number, resources_per_replica={"CPU": 0.01}, timeouts=limits, failure_options=never)
    yield made
    made._abort(fetch=False)


def pids(strategy: TwoReplicas) -> tuple[int, ...]:
    return strategy.local_results(strategy.run(os.getpid))


def train(strategy: TwoReplicas, step: Callable[..., Any], x: Any) -> None:
    for _ in range(50):
        strategy.local_results(strategy.run(step, args=(x,)))


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [((rd.MirroredStrategy, 2), 1), pytest.param((rd.CentralStorageStrategy, 2), 0, marks=LONG)],
    ids=["mirrored", "central"],
    indirect=["strategy"],
)
def test_a_killed_replica_is_named(strategy: TwoReplicas, victim: int, caplog: pytest.LogCaptureFixture) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1)

    def step(x: torch.Tensor) -> Any:
        time.sleep(0.1)
        loss = model(x).mean()
        loss.backward()
        return loss

    x = strategy.distribute_values_from_function(lambda ctx: torch.ones(1, 1))
    target = pids(strategy)[victim]
    strategy.run(step, args=(x,))
    os.kill(target, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(rd.UnavailableError, match=rf"replica {victim} of \w+Strategy-.* is gone while"):
        train(strategy, step, x)
    assert time.monotonic() - start < 30
    with pytest.raises(rd.UnavailableError, match="is gone while"):
        strategy.run(step, args=(x,))
    with contextlib.suppress(rd.RaydistError), caplog.at_level(logging.WARNING, "raydist"):
        strategy.close()
    assert "keep values of before: replicas are gone. Load" in caplog.text


def test_a_stopped_replica_is_an_error_after_the_limit(strategy: TwoReplicas) -> None:
    target = pids(strategy)[1]

    def step() -> float:
        total = rd.get_replica_context().all_reduce("SUM", 1.0)
        return float(total)

    assert strategy.run(step).values == (2.0, 2.0)
    os.kill(target, signal.SIGSTOP)
    try:
        start = time.monotonic()
        errors = (rd.DeadlineExceededError, rd.UnavailableError)
        with pytest.raises(errors, match=r"There is no answer from replica 1 of \w+Strategy-\w+ on node \S+ \(\w+\):"):
            strategy.local_results(strategy.run(step))
        assert time.monotonic() - start < 30
    finally:
        os.kill(target, signal.SIGCONT)


@pytest.mark.parametrize(
    ("strategy", "busy"),
    [((rd.MirroredStrategy, 1), True), pytest.param((rd.CentralStorageStrategy, 2), False, marks=LONG)],
    ids=["mirrored", "central"],
    indirect=["strategy"],
)
def test_a_stopped_replica_holds_close_no_longer_than_its_limit(strategy: TwoReplicas, busy: bool) -> None:
    def step() -> None:
        rd.get_replica_context().all_reduce("SUM", 1.0)

    with strategy.scope():
        model = nn.Linear(1, 1)
    strategy.run(lambda: model(torch.ones(1, 1)).sum())
    target = pids(strategy)[-1]
    os.kill(target, signal.SIGSTOP)
    start = time.monotonic()
    try:
        if busy:
            strategy.run(step)
            with pytest.raises(rd.DeadlineExceededError, match=r"replica 0 of \w+Strategy-.* did not even say"):
                strategy.close()
        else:
            strategy.close()
    finally:
        took = time.monotonic() - start
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGCONT)
    assert took < 10  # close_s is 5 here; it took up to three times the limit, and collective_s
    assert type(model) is nn.Linear


def test_a_forked_child_is_told_at_once_and_harms_nobody(two: rd.MirroredStrategy) -> None:
    strategy = two
    with strategy.scope():
        model = nn.Linear(1, 1)
    dataset = strategy.distribute_dataset(rd.Dataset.range(12).batch(2))
    iterator = iter(dataset)
    batch = next(iterator)

    def total(x: torch.Tensor) -> Any:
        return model(x.float().view(-1, 1)).sum() * 0 + x.sum()

    strategy.local_results(strategy.run(total, args=(batch,)))
    result = strategy.run(total, args=(batch,))
    workers = iter(rd.Dataset.range(9).map(lambda x: x).with_options(rd.Options(num_input_workers=1)))
    threads = iter(rd.Dataset.range(9).prefetch(2))
    plain = iter(rd.Dataset.range(9))
    assert [int(next(each)) for each in (workers, threads, plain)] == [0, 0, 0]
    uses: dict[str, Callable[[], object]] = {
        "run": lambda: strategy.run(len, args=([],)),
        "scope": lambda: strategy.scope().__enter__(),
        "distribute": lambda: iter(strategy.distribute_dataset(rd.Dataset.range(2).batch(1))),
        "close": strategy.close,
        "value": lambda: result.values,
        "batch": lambda: batch.values,
        "variable": lambda: model.weight.sum(),
        "next": lambda: next(iterator),
        "another": lambda: next(iter(dataset)),
        "state": iterator.state_dict,
        "close iterator": iterator.close,
        "workers": lambda: next(workers),
        "threads": lambda: next(threads),
        "plain": lambda: next(plain),
        "plain state": plain.state_dict,
        "close plain": plain.close,
    }

    def child() -> None:
        for name, use in uses.items():
            with pytest.raises(rd.FailedPreconditionError, match="forked child"):
                pytest.fail(f"{name} gave {use()!r}")
        gc.collect()

    assert in_a_forked_child(child) == 0
    assert [int(next(each)) for each in (workers, threads, plain)] == [1, 1, 1]
    assert result.values == (0, 1)
    assert strategy.run(lambda x: int(x.sum()), args=(next(iterator),)).values == (2, 3)
    workers.close()
    threads.close()


def test_a_child_that_a_step_leaves_behind_ends(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    def step() -> int:
        raises = rd.get_replica_context().replica_id_in_sync_group == 1
        pid = os.fork()
        if pid == 0:
            (tmp_path / str(os.getpid())).touch()
            if raises:
                raise KeyError("in the child")
        return pid

    children = two.run(step).values
    assert all(children)
    end = time.monotonic() + 20
    while any(is_running(child) for child in children) and time.monotonic() < end:
        time.sleep(0.1)
    assert [child for child in children if is_running(child)] == []
    assert {path.name for path in tmp_path.iterdir()} == set(map(str, children))
    assert two.run(lambda: 1).values == (1, 1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SHUTDOWN = """
import time, ray, torch
import raydist as rd

def open_strategy():
    strategy = rd.MirroredStrategy(1)
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    iterator = iter(strategy.distribute_dataset(rd.Dataset.range(4).map(lambda x: x).batch(2)))
    strategy.run(lambda x: model(x.float().view(-1, 1)).sum(), args=(next(iterator),)).sum().item()
    workers = iter(rd.Dataset.range(9).map(lambda x: x).with_options(rd.Options(num_input_workers=1)))
    next(workers)
    return strategy, model, iterator, workers

def told(use):
    try:
        use()
    except rd.UnavailableError as error:
        assert "shut down" in str(error), error
    else:
        raise AssertionError("not told")

for again in (False, True):
    strategy, model, iterator, workers = open_strategy()
    ray.shutdown()
    if again:
        ray.init(include_dashboard=False, logging_level="ERROR")
    began = time.monotonic()
    told(lambda: strategy.run(len, args=([],)))
    told(lambda: next(iterator))
    told(lambda: [next(workers) for _ in range(9)])
    iterator.close()
    strategy.close()
    strategy.close()
    workers.close()
    assert type(model) is torch.nn.Linear
    assert ray.is_initialized() == again, "closing must not start Ray"
    print("closed", time.monotonic() - began < 10, flush=True)
"""


@LONG
def test_what_outlives_its_ray_says_so_and_closes() -> None:
    with ray_home() as home:
        printed = home.run(SHUTDOWN)
    assert printed.split() == ["closed", "True"] * 2


PROGRAM = """
import os, signal, time
import ray, torch
import raydist as rd
from raydist.strategies.hosted import WhenDropped

signal.signal(signal.SIGINT, signal.default_int_handler)  # which what a shell starts in the background ignores

def step(x):
    time.sleep(0.05)
    loss = model(x).mean()
    loss.backward()
    return loss

class Owner:
    pass

owner = Owner()
WhenDropped(owner).add(lambda: print("closed", flush=True))
strategy = rd.MirroredStrategy(1)
with strategy:
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    dataset = rd.Dataset.range(10**6).map(lambda x: torch.ones(1)).batch(4)
    print("session", ray._private.worker.global_worker.node.get_session_dir_path(), flush=True)
    pids = strategy.local_results(strategy.run(os.getpid))
    for number, batch in enumerate(strategy.distribute_dataset(dataset)):
        strategy.run(step, args=(batch,))
        if number == 3:
            print("training", *pids, flush=True)
"""


def start() -> tuple[WatchedProgram, str, set[int]]:
    """The program, once it trains; its Ray session and the ids of its replicas' processes."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    program = WatchedProgram.start([sys.executable, "-c", PROGRAM], folder=Path.cwd(), environment=environment)
    end = time.monotonic() + 100
    while not (found := re.search(r"(?ms)^session (.*?)$.*^training (.*?)$", program.printed())):
        if program.process.poll() is not None or time.monotonic() > end:
            raise program.hangs()
        time.sleep(0.05)
    return program, Path(found[1]).name, {int(word) for word in found[2].split()}


def left_over(session: str, replicas: set[int]) -> list[str]:
    """Processes of the session, and its replicas, that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and (session in command or int(entry.name) in replicas):
            found.append(f"{entry.name} {command[:80]}")
    return found


# Each starts a Ray of its own. What programs leave that end by themselves, tests/test_ways_in.py shows.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=LONG)])
def test_nothing_is_left_of_a_program_that_is_ended(number: signal.Signals) -> None:
    files = shared_files()
    program, session, replicas = start()
    with contextlib.closing(program):
        program.process.send_signal(number)
        try:
            status = program.process.wait(60)
        except TOO_LONG:
            raise program.hangs() from None
        output = program.printed()
    assert status == -number or (status == 1 and number == signal.SIGINT), output
    assert output.count("closed") == (number == signal.SIGINT), "it closes what it held till then"
    end = time.monotonic() + 10
    while left_over(session, replicas) and time.monotonic() < end:
        time.sleep(0.2)
    assert left_over(session, replicas) == []
    assert not left_behind(files)
