from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle as rays_copy
from ray._private.state import state
from ray.core.generated import gcs_pb2

import raydist as rd
from raydist.actors.class_tracking import cloudpickle, share_classes
from raydist.actors.portable_errors import PortableError, pack_error
from raydist.actors.replica import ReplicaHost
from raydist.actors.supervision import (
    RemoteFailure,
    done_before_failure,
    kill_actors,
    missing,
    root_cause,
    wait_for,
    wait_for_all,
)
from raydist.actors.version_check import Software, installed_software, require_devices, require_same_software
from raydist.core.errors import (
    CancelledError,
    CollectiveMismatchError,
    DeadlineExceededError,
    FailedPreconditionError,
    RaydistError,
    UnavailableError,
)
from raydist.core.exception_utils import what_was_raised
from tests.odd_errors import Departure, Mute


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
    ray.wait(refs, num_returns=2, timeout=30)
    late: Any = ray.remote(num_cpus=0)(Worker).remote()
    assert [done_before_failure(ref) for ref in (*refs, late.stuck.remote(60))] == [[1, 2], "b", None]
    kill_actors([late])


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


# --- the actor of a replica, and versions on all nodes ----------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    results: tuple[Any, ...]
    error: BaseException | None = None


class Runner:
    """Answers with the error that it is given."""

    def __init__(self, name: str) -> None:
        self.name = name

    def steps(self, group: Any, objects: tuple[Any, ...]) -> Answer:
        return Answer((self.name,), group)


def test_errors_leave_as_values_whatever_their_class() -> None:
    host = ReplicaHost()
    host.start(0, Runner, "first")
    for error, restored in ((KeyError("mine"), KeyError), (KeyboardInterrupt("mine"), RaydistError)):
        with pytest.raises(RemoteFailure) as failure:
            host.steps(0, error)
        assert failure.value.before == Answer(("first",))
        arrived = failure.value.portable.restore()
        assert type(arrived) is restored
        assert "mine" in str(arrived)


def test_variables_are_set_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIST_TEST_VARIABLE", "before")
    ReplicaHost({"RAYDIST_TEST_VARIABLE": "3"})
    assert os.environ["RAYDIST_TEST_VARIABLE"] == "3"


# --- versions and devices of all nodes --------------------------------------------------------------------------------

NAMES = ["replica 0 on node a", "replica 1 on node b", "replica 2 on node c"]


def software(python: str = "3.11.2", torch: str = "2.9.0", raydist: str = "1.0", gpus: int = 0) -> Software:
    return Software((("Python", python), ("torch", torch), ("raydist", raydist)), gpus)


def test_other_versions_are_named_with_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for other, said in [
        (software(python="3.12.0"), "Python 3.12.0, not 3.11.2"),
        (software(torch="2.8.1"), "torch 2.8.1, not 2.9.0"),
        (software(raydist="0.9"), "raydist 0.9, not 1.0. Install the same versions"),
    ]:
        said = f"versions of the program's node: replica 1 on node b has {said}"
        with pytest.raises(FailedPreconditionError, match=said):
            require_same_software(software(), [software(), other, software(gpus=4)], NAMES)
    own = installed_software()
    monkeypatch.setattr(torch, "__version__", f"{dict(own.versions)['torch']}+cu999")
    require_same_software(own, [installed_software()], NAMES[:1])  # builds of one version may meet


def test_a_gpu_that_torch_does_not_see_is_named_with_its_node() -> None:
    require_devices(["cpu"] * 3, [software()] * 3, NAMES)
    require_devices(["cuda:0"] * 3, [software(gpus=1)] * 3, NAMES)
    with pytest.raises(FailedPreconditionError, match="torch sees none on replica 1 on node b. Install"):
        require_devices(["cuda:0"] * 3, [software(gpus=1), software(), software(gpus=1)], NAMES)


# --- errors of any class between processes ----------------------------------------------------------------------------


class Odd(Exception):
    """Pickles, but cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")


class Holding(Exception):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holding a lock")
        self.lock = threading.Lock()


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_ordinary_error_arrives_as_it_was() -> None:
    error = raised(KeyError("label"))
    error.add_note("In map-1.")
    found = pack_error(error, "In worker 3.").restore()
    assert type(found) is KeyError
    assert found.args == ("label",)
    assert found.__notes__ == ["In map-1.", "In worker 3."]
    shown = "".join(traceback.format_exception(found))
    assert "in raised" in shown


class Slotted(Exception):
    """Keeps its message where pickling does not look."""

    __slots__ = ("what",)

    def __init__(self, code: int) -> None:
        self.what = "unknown"

    def __str__(self) -> str:
        return self.what


class Hostile(Exception):
    """Raises from whatever pickling asks of it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not to be pickled")

    def __getstate__(self) -> Any:
        raise RuntimeError("nor to be looked at")


def test_the_type_arrives_whatever_its_constructor_and_fields() -> None:
    for error, message in [(Odd(3, "odd"), r"^odd \(3\)"), (Holding(), "^holding a lock"), (Hostile("h", 3), "'h', 3")]:
        packed = pack_error(raised(error), "In worker 3.")
        assert isinstance(packed, PortableError)
        with pytest.raises(type(error), match=message) as caught:
            raise pickle.loads(pickle.dumps(packed)).restore()
        assert caught.value.__notes__ == ["In worker 3."]
        assert "in raised" in "".join(traceback.format_exception(caught.value))
    found = pack_error(raised(Holding())).restore()
    assert "unlocked _thread.lock" in found.lock, "a field that cannot travel is shown"  # type: ignore[attr-defined]


def test_messages_and_notes_that_cannot_travel_are_told_otherwise() -> None:
    error = Slotted(3)
    error.what = "lost on the way"
    found = pack_error(raised(error)).restore()
    assert type(found) is Slotted
    assert found.__notes__ == ["Its message was: lost on the way"]
    packed = pack_error(raised(Mute(7, 8)), "In worker 3.")
    assert "Mute: <its __str__ raised RuntimeError; its arguments: (7,)>" in packed.title
    found = packed.restore()
    assert (type(found), found.args, found.__notes__) == (Mute, (7,), ["odd", "In worker 3."])
    odd_notes: list[tuple[Any, list[str]]] = [(None, []), ("odd", ["odd"]), (("odd",), ["odd"]), (3, ["3"])]
    for notes, expected in odd_notes:
        noted = ValueError("bad")
        noted.__notes__ = notes
        assert pack_error(raised(noted), "In worker 3.").restore().__notes__ == [*expected, "In worker 3."]


def test_a_class_that_does_not_arrive_still_shows_itself() -> None:
    packed = replace(pack_error(raised(Odd(3, "odd")), "In worker 3."), pickled=b"no pickle")
    with pytest.raises(RaydistError, match=r"Odd: odd \(3\)") as caught:
        raise packed.restore()
    assert caught.value.__notes__ == ["In worker 3."]
    assert "in raised" in "".join(traceback.format_exception(caught.value))


def test_an_error_that_is_no_exception_does_not_end_the_receiver_and_is_there_for_who_asks() -> None:
    assert isinstance(pack_error(raised(SystemExit(3))).restore(), RaydistError)
    found = pack_error(raised(Departure("left")), "In worker 3.").restore()
    original = what_was_raised(found)
    assert (type(original), original.args, original.__notes__) == (Departure, ("left",), ["In worker 3."])
    assert type(what_was_raised(pack_error(found).restore())) is Departure


# --- classes of the user's script -------------------------------------------------------------------------------------

_COPIES: tuple[Any, ...] = (cloudpickle, rays_copy)

# What came by one copy before the two were made one, goes by the other afterwards.
_LATE = """
import pickle, sys
import cloudpickle
from ray import cloudpickle as rays_copy

data = bytes.fromhex(sys.argv[1])
one = pickle.loads(data)
from raydist.actors.class_tracking import share_classes
for copy in (cloudpickle, rays_copy):
    assert type(pickle.loads(copy.dumps(one))) is type(one), copy
    print(copy.dumps(one).hex())
"""


def made_here() -> Any:
    """An object whose class no other process can import."""
    return type("Cls", (), {"__module__": "__main__"})()


def test_a_class_that_comes_by_one_and_leaves_by_the_other_stays_the_same() -> None:
    share_classes()
    for goes in _COPIES:
        one = made_here()
        command = [sys.executable, "-c", _LATE, goes.dumps(one).hex()]
        there = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        for line, comes in itertools.product(there.stdout.split(), _COPIES):
            assert type(comes.loads(bytes.fromhex(line))) is type(one)
