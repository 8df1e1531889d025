from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raydist.actors import main_thread_rest
from raydist.actors.main_thread_rest import MainThreadRest

CROWD = 100_000


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Leaves the process as it was."""
    before = signal.getsignal(signal.SIGURG)
    yield
    signal.signal(signal.SIGURG, before)


def busy(rest: MainThreadRest, seconds: float) -> threading.Thread:
    def work() -> None:
        with rest.while_busy():
            time.sleep(seconds)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_few_processes_need_no_rest() -> None:
    before = signal.getsignal(signal.SIGURG)
    rest = MainThreadRest(num_neighbours=1)
    busy(rest, 0.0).join()
    assert signal.getsignal(signal.SIGURG) is before
    assert not [thread for thread in threading.enumerate() if thread.name == "raydist-rest"]


def test_the_main_thread_rests_until_the_others_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_thread_rest, "_REST_S", 60.0)
    thread = busy(MainThreadRest(CROWD), 1.0)
    began, num_looks = time.monotonic(), 0
    while thread.is_alive():
        time.sleep(0.01)
        num_looks += 1
    assert time.monotonic() - began < 30
    assert num_looks < 50  # in a second that would be a hundred


def test_a_rest_has_an_end_while_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_thread_rest, "_REST_S", 0.05)
    thread = busy(MainThreadRest(CROWD), 1.0)
    num_looks = 0
    while thread.is_alive():
        time.sleep(0.01)
        num_looks += 1
    assert num_looks > 3


def test_of_two_pieces_of_work_the_end_of_one_ends_a_rest_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main_thread_rest, "_REST_S", 60.0)
    rest = MainThreadRest(CROWD)
    threads = [busy(rest, seconds) for seconds in (1.0, 2.0)]
    began, looks = time.monotonic(), [0.0]
    while threads[1].is_alive():
        time.sleep(0.01)
        looks.append(time.monotonic() - began)
    rests = [(before, after) for before, after in itertools.pairwise(looks) if after - before > 0.3]
    assert [round(after) for _, after in rests] == [1, 2]
    assert rests[1][0] - rests[0][1] > 0.02  # for who was answered, and asks for more


def test_nobody_rests_between_two_pieces_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_thread_rest, "_AWAKE_S", 0.005)
    monkeypatch.setattr(main_thread_rest, "_REST_S", 60.0)
    rest = MainThreadRest(CROWD)
    for _ in range(20):
        busy(rest, 0.01).join()
    began = time.monotonic()
    time.sleep(0.2)
    assert time.monotonic() - began < 30


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_an_actor_of_a_crowd_wakes_seldom_and_still_answers(ray_cluster: None) -> None:
    class Crowded:
        def __init__(self, num_neighbours: int) -> None:
            self._rest = MainThreadRest(num_neighbours)

        def work(self, seconds: float) -> int:
            """How often the main thread woke."""
            with self._rest.while_busy():
                before = wakes_of_main_thread()
                time.sleep(seconds)
                return wakes_of_main_thread() - before

        @ray.method(concurrency_group="control")
        def ping(self) -> None:
            pass

    kind = ray.remote(concurrency_groups={"control": 1}, num_cpus=0.1)(Crowded)  # type: ignore[call-overload]  # an option Ray leaves out
    actors = [kind.remote(num_neighbours) for num_neighbours in (1, CROWD)]
    works = [actor.work.remote(2.0) for actor in actors]
    for _ in range(5):
        ray.get([actor.ping.remote() for actor in actors], timeout=30)
    alone, crowded = ray.get(works, timeout=60)
    assert crowded < 0.6 * alone
    for actor in actors:
        ray.kill(actor)


def wakes_of_main_thread() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
