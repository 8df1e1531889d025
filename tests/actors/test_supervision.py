from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray._private.state import state
from ray.core.generated import gcs_pb2

import raydist as rd
from raydist.actors.portable_errors import pack_error
from raydist.actors.supervision import (
    RemoteFailure,
    done_before_failure,
    kill_actors,
    missing,
    root_cause,
    spoken_title,
    wait_for,
    wait_for_all,
)
from raydist.core.errors import CancelledError, CollectiveMismatchError, DeadlineExceededError, UnavailableError


def test_the_root_cause_explains_the_others() -> None:
    broken, given_up = UnavailableError("connection closed"), CancelledError("step 4 was given up")
    user, mismatch = ValueError("bad label"), CollectiveMismatchError("different shapes")
    dead = UnavailableError("replica 1 is gone while step 3 was under way: killed", actor="replica 1")
    late = DeadlineExceededError("no answer")
    assert root_cause([given_up, broken, user, mismatch]) is user
    assert root_cause([user, dead]) is dead
    assert root_cause([given_up, mismatch, broken]) is mismatch
    assert root_cause([broken, late, given_up]) is late
    assert root_cause([given_up, broken]) is broken
    assert not hasattr(missing(dead, ["replica 0"]), "__notes__"), "it names who is gone"


class Worker:
    def answer(self, value: Any) -> Any:
        return value

    def fail_half_way(self, done: Any) -> None:
        raise RemoteFailure(pack_error(ValueError("half way")), done)

    def fail(self, error: Exception) -> None:
        raise RemoteFailure(pack_error(error, "note of the worker"))

    def stuck(self, seconds: float) -> None:
        time.sleep(seconds)


def wait(refs: list[Any], **changed: Any) -> list[Any]:
    names = [f"worker {index}" for index in range(len(refs))]
    limits: dict[str, Any] = {
        "timeout_s": 20.0,
        "doing": "step 3",
        "limit": "Timeouts.step_s",
        "on_error": lambda: None,
    }
    return wait_for_all(refs, names, **{**limits, **changed})


def test_an_interrupt_of_a_read_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:  # as ray.get does, seen with signals at random moments
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()

    monkeypatch.setattr(ray, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wait([object()])


@pytest.fixture(scope="module")
def workers(ray_cluster: None) -> Iterator[list[Any]]:
    actors = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(2)]
    yield actors
    kill_actors(actors)


@pytest.mark.ray
def test_what_was_done_before_a_failure_is_told(workers: list[Any]) -> None:
    refs = [workers[0].fail_half_way.remote([1, 2]), workers[1].answer.remote("b")]
    with pytest.raises(ValueError, match="half way"):
        wait(refs)
    late = workers[1].stuck.remote(0.5)
    assert [done_before_failure(ref) for ref in (*refs, late)] == [[1, 2], "b", None]


@pytest.mark.ray
def test_a_dead_worker_is_named_and_its_peers_are_told(workers: list[Any]) -> None:
    told: list[bool] = []
    mortal: Any = ray.remote(num_cpus=0)(Worker).remote()
    refs = [workers[0].answer.remote(1), mortal.stuck.remote(60)]
    ray.kill(mortal)
    with pytest.raises(UnavailableError, match="worker 1 is gone while step 3") as caught:
        wait(refs, on_error=lambda: told.append(True))
    assert caught.value.actor == "worker 1"
    assert told == [True]


@pytest.mark.ray
def test_who_says_nothing_is_named_beside_the_peer_that_missed_it(
    workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydist.actors.supervision.GRACE_S", 0.2)

    def notes_on(error: Exception, match: str) -> list[str]:
        with pytest.raises(type(error), match=match) as caught:
            wait([workers[0].fail.remote(error), workers[1].stuck.remote(0.6)])
        return caught.value.__notes__

    for kind in (UnavailableError, DeadlineExceededError):
        notes = notes_on(kind("all_reduce by rank 0 failed"), "by rank 0 failed")
        assert "There is no answer from worker 1: the process or its machine may be gone." in notes
    assert not any("no answer" in note for note in notes_on(ValueError("mine"), "mine"))


@pytest.mark.ray
def test_who_does_not_answer_is_named(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.actors.supervision.GRACE_S", 0.2)
    answered = workers[0].answer.remote(1)
    wait([answered])
    with pytest.raises(
        DeadlineExceededError, match=r"within 0.5 s, but worker 1 did not answer.*raise Timeouts.step_s"
    ):
        wait([answered, workers[1].stuck.remote(1.5)], timeout_s=0.5)


@pytest.mark.ray
def test_what_is_there_is_found_at_once_and_what_is_not_after_the_limit_or_when_nobody_wants_it(
    workers: list[Any],
) -> None:
    assert wait_for(ray.put(1), 0.0, lambda: False, actor="a")
    late = workers[0].stuck.remote(2.0)
    begin = time.monotonic()
    assert not wait_for(late, 0.3, lambda: False, actor="a")
    assert 0.3 <= time.monotonic() - begin < 2.0
    answers = iter([False, True])
    with pytest.raises(CancelledError, match="waited for worker 3 was closed"):
        wait_for(late, 60.0, lambda: next(answers), actor="worker 3")


def test_a_killed_actor_is_not_told_to_exit_as_well(ray_cluster: None) -> None:
    """Ray does that where nobody refers to an actor any more."""

    class Handle:
        """Of an actor."""

    handle = Handle()
    kept = weakref.ref(handle)
    kill_actors([handle])
    del handle
    gc.collect()
    assert kept() is not None


def test_sigterm_ends_an_actor_without_shutting_its_interpreter_down() -> None:
    program = (
        "import atexit, os, signal\n"
        "from raydist.actors.supervision import end_on_sigterm\n"
        "signal.signal(signal.SIGTERM, lambda *_: exit(1))  # as Ray does\n"
        "end_on_sigterm()\n"
        "atexit.register(print, 'shut down')\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (-15, "")


# --- titles of actors -------------------------------------------------------------------------------------------------


def test_names_as_a_person_says_them() -> None:
    for name, title in [
        ("central-storage-0a1b2c3d-replica-12", "replica 12 of central-storage-0a1b2c3d"),
        ("parameter-server-0a1b2c3d-worker-1", "worker 1 of parameter-server-0a1b2c3d"),
        ("parameter-server-0a1b2c3d-server-0", "parameter server 0 of parameter-server-0a1b2c3d"),
        ("mirrored-0a1b2c3d-input-12345678", "input pipeline of mirrored-0a1b2c3d"),
        ("raydist-input-worker-3", "input worker 3"),
        ("somebody", "somebody"),
        ("", ""),
    ]:
        assert spoken_title(name) == title


@pytest.mark.ray
def test_ray_shows_who_is_who(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(2)
    group = strategy._launched
    assert group is not None
    table = state._connect_and_get_accessor().get_actor_table(None, None)
    message: Any = vars(gcs_pb2)["ActorTableData"]  # its stub does not list it
    shown = {message.FromString(entry).repr_name for entry in table}
    name = group._setups[0].name
    assert {f"replica {rank} of {name}" for rank in range(2)} <= shown
    assert f"input pipeline of {name}" in shown
