"""A coordinator whose workers are threads: order, errors, deaths, waiting."""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import raydist as rd
from raydist.actors.version_check import Software
from raydist.cluster.nodes import Cluster, Node
from raydist.coordinator.launch import PsRequest, plan_ps
from raydist.coordinator.per_worker import (
    PerWorkerInput,
    PerWorkerIterator,
    PerWorkerValue,
    _job,
    _open_iterator,
    _seeds_of,
)
from raydist.coordinator.remote_value import holds_remote
from tests.coordinator.in_process import TIMEOUTS, ThreadPort, coordinated, scheduled
from tests.waiting import wait_until


def test_closures_run_on_all_workers_and_their_values_come_back() -> None:
    with coordinated() as (coordinator, _, side):
        closures = [scheduled(coordinator, lambda x: {"square": torch.tensor(x * x)}, n) for n in range(50)]
        assert [coordinator.value_of(each)["square"].item() for each in closures] == [n * n for n in range(50)]
        coordinator.join()
        assert coordinator.done()
        assert {worker for _, worker in side.begun} == {0, 1}
        assert [number for number, _ in sorted(side.begun)] == list(range(50))
        assert side.num_finished == 1


def fail(text: str) -> None:
    raise ValueError(text)


def test_an_iterator_that_ends_in_a_closure_is_an_error_of_its_own() -> None:
    with coordinated(1) as (coordinator, _, _), pytest.raises(rd.OutOfRangeError, match="an iterator of it has ended"):
        coordinator.value_of(scheduled(coordinator, lambda: next(iter(()))))


def test_the_first_error_is_raised_once_the_rest_is_cancelled_and_then_all_works() -> None:
    gate = threading.Event()
    with coordinated(1) as (coordinator, _, side):
        before = scheduled(coordinator, pickled_wait(gate))
        failing = scheduled(coordinator, fail, "first")
        behind = [scheduled(coordinator, lambda: 1) for _ in range(20)]
        gate.set()
        with pytest.raises(ValueError, match="first") as caught:
            coordinator.join()
        assert any("In closure 1 on worker 0" in note for note in caught.value.__notes__)
        assert coordinator.value_of(before) == "waited"
        for each in behind:
            with pytest.raises(rd.CancelledError, match=r"cancelled before it began.*Please reschedule"):
                coordinator.value_of(each)
        with pytest.raises(ValueError, match="first"):
            coordinator.value_of(failing)
        assert {number for number, _ in side.begun} == {0, 1}
        coordinator.join()
        assert coordinator.value_of(scheduled(coordinator, lambda: "again")) == "again"


_GATES: dict[int, threading.Event] = {}


def pickled_wait(gate: threading.Event) -> Callable[[], str]:
    """A function that waits for `gate`, by value."""
    _GATES[id(gate)] = gate
    number = id(gate)

    def wait() -> str:
        from tests.coordinator.test_coordinator import _GATES

        assert _GATES[number].wait(20)
        return "waited"

    return wait


def test_an_error_comes_out_of_the_next_call_whatever_that_is() -> None:
    with coordinated() as (coordinator, _, _):
        for ask in (coordinator.done, lambda: scheduled(coordinator, lambda: None)):
            scheduled(coordinator, fail, "bad")
            wait_until(lambda: coordinator._queue.error)
            with pytest.raises(ValueError, match="bad"):
                ask()
            coordinator.join()


def test_join_has_a_limit_and_says_who_is_at_work() -> None:
    gate = threading.Event()
    with coordinated(1) as (coordinator, _, _):
        closure = scheduled(coordinator, pickled_wait(gate))
        with pytest.raises(rd.DeadlineExceededError, match=r"0\.2 s \(timeout\).*worker 0 \(closure 0\).*Nothing was"):
            coordinator.join(0.2)
        gate.set()
        coordinator.join(10)
        assert coordinator.value_of(closure) == "waited"


def test_a_closure_that_kills_every_worker_it_is_given_to_is_an_error() -> None:
    with coordinated() as (coordinator, port, side):
        gate = threading.Event()
        closure = scheduled(coordinator, pickled_wait(gate))
        seen = 0
        while not closure.ended:
            if len(side.begun) > seen:
                seen += 1
                port.kill(side.begun[-1][1])
            time.sleep(0.01)
        gate.set()
        with pytest.raises(rd.UnavailableError, match=r"5 workers died while they had it"):
            coordinator.value_of(closure)


def test_no_worker_left_is_an_error_of_everything() -> None:
    gate = threading.Event()
    with coordinated(1) as (coordinator, port, side):
        closure = scheduled(coordinator, pickled_wait(gate))
        wait_until(lambda: side.begun)
        port.refuse_to_start.add(0)
        port.kill(0)
        with pytest.raises(rd.UnavailableError, match=r"No worker is left.*worker 0 has no place"):
            coordinator.value_of(closure)
        gate.set()
        with pytest.raises(rd.UnavailableError, match=r"No worker is left"):
            coordinator.read("ping")


def test_after_close_nothing_is_scheduled_and_what_waits_is_cancelled() -> None:
    gate = threading.Event()
    with coordinated(1) as (coordinator, _, _):
        closures = [scheduled(coordinator, pickled_wait(gate)) for _ in range(5)]
        coordinator.close()
        gate.set()
        with pytest.raises(rd.CancelledError, match=r"closed before this closure was done"):
            coordinator.value_of(closures[-1])
        with pytest.raises(rd.FailedPreconditionError, match="it was closed"):
            scheduled(coordinator, lambda: None)


def test_closures_are_done_once_whichever_workers_die() -> None:
    random.seed(0)
    with coordinated(2, TIMEOUTS) as (coordinator, port, side):
        closures = [scheduled(coordinator, lambda n: n, n) for n in range(100)]
        # Not more: the fifth death that one closure meets is an error, and a busy machine does none in between.
        for number in range(4):
            port.kill(number % 2)
            closures += [scheduled(coordinator, lambda n: n, n) for n in range(len(closures), len(closures) + 16)]
            time.sleep(random.random() / 50)
        coordinator.join()
        assert [coordinator.value_of(each) for each in closures] == list(range(len(closures)))
        assert side.fenced & {(0, 0), (1, 0)}


class Restarts:
    """A `RecoversServers` whose servers have nothing: only the workers start again."""

    def is_loss(self, error: Exception) -> bool:
        return isinstance(error, rd.UnavailableError) and error.actor == "server 0"

    def recover(self, error: Exception, coordinator: Any) -> tuple[int, ...]:
        coordinator.ask_any("follow", within_s=20)  # the worker has answered all that it was sent
        coordinator.stop_workers()
        coordinator.start_workers()
        return ()


def pickled_loss(gate: threading.Event) -> Callable[[], str]:
    """A function that waits for `gate`, and then raises that a server is gone, the first time that it runs."""
    wait, number = pickled_wait(gate), id(gate)

    def lose() -> str:
        from tests.coordinator.test_coordinator import _GATES

        waited = wait()
        if _GATES.pop(number + 1, None):
            raise rd.UnavailableError("server 0 is gone.", actor="server 0")
        return waited

    _GATES[number + 1] = gate
    return lose


def test_what_a_worker_has_skipped_after_the_loss_of_a_server_runs_again() -> None:
    gate = threading.Event()
    with coordinated(1) as (coordinator, port, side):
        coordinator.recover_servers(Restarts())
        coordinator.read("ping")  # the worker has started
        losing = scheduled(coordinator, pickled_loss(gate))
        behind = [scheduled(coordinator, lambda n: n, n) for n in range(5)]
        assert len(port.messages) == 2, "the worker has a message that it will skip"
        gate.set()
        coordinator.join()
        assert [coordinator.value_of(each) for each in (losing, *behind)] == ["waited", *range(5)]
        assert [number for number, _ in side.begun] == [0, *range(6)], "in order"
        assert port.num_replaced == 1


def test_who_is_to_end_waits_only_for_what_has_begun(tmp_path: Path) -> None:
    gate = threading.Event()
    manager = rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 1)
    with coordinated(1) as (coordinator, _, side):
        manager.watch()
        begun = scheduled(coordinator, pickled_wait(gate))
        behind = [scheduled(coordinator, lambda: 1) for _ in range(50)]
        os.kill(os.getpid(), signal.SIGTERM)
        coordinator.wait_or_leave()
        assert not begun.ended, "it does not wait for the rest"
        cancelled = coordinator.cancel_pending(0)
        assert cancelled
        assert coordinator.cancel_pending(0) == []
        gate.set()
        coordinator.join()
        assert coordinator.value_of(begun) == "waited"
        assert len(side.begun) == 51 - len(cancelled)
        with pytest.raises(rd.CancelledError, match="had not begun when the process was to end"):
            coordinator.value_of(behind[-1])
    with pytest.raises(rd.Preempted):
        manager.close()


OLD = Software((("raydist", "0.0.9"),))


def test_a_worker_of_another_version_is_said_before_anything_runs() -> None:
    port = ThreadPort(2)
    port.software[1] = OLD
    said = rf"worker 1 has raydist 0\.0\.9, not {rd.__version__}\. Install the same"
    with coordinated(2, port=port) as (coordinator, _, side):
        with pytest.raises(rd.FailedPreconditionError, match=said):
            coordinator.value_of(scheduled(coordinator, lambda: 1))
        with pytest.raises(rd.FailedPreconditionError, match=said):
            scheduled(coordinator, lambda: 2)
        assert side.begun == []


def test_a_worker_that_comes_back_with_another_version_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raydist"), coordinated(2) as (coordinator, port, side):
        for _ in range(2):
            scheduled(coordinator, lambda: 1)
        coordinator.join()
        side.begun.clear()
        port.software[1] = OLD
        port.kill(1)
        closures = [scheduled(coordinator, lambda n: n, n) for n in range(8)]
        coordinator.join()
        assert [coordinator.value_of(closure) for closure in closures] == list(range(8))
        wait_until(lambda: caplog.messages)
    assert "The others go on without worker 1: All nodes must have the versions" in caplog.messages[0]


def test_workers_wait_for_one_that_says_nothing_and_then_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.coordinator.worker_pool._TOGETHER_S", 0.5)
    port = ThreadPort(2)
    port.says_nothing.add(1)
    began = time.monotonic()
    with coordinated(2, port=port) as (coordinator, _, _side):
        assert coordinator.value_of(scheduled(coordinator, lambda: 7)) == 7
        assert 0.5 <= time.monotonic() - began < TIMEOUTS.start_s


def test_it_is_no_number_its_parts_are_values_and_it_prints_as_what_it_is() -> None:
    uses: list[Any] = [float, int, bool, lambda x: x + 1, lambda x: 1 - x, torch.exp, lambda x: f"{x:.2f}"]
    with coordinated(1) as (coordinator, _, _):
        number = rd.RemoteValue(coordinator, scheduled(coordinator, lambda: 1.0))
        for use in uses:
            with pytest.raises(rd.InvalidArgumentError, match=r"strategy\.reduce"):
                use(number)
        value = rd.RemoteValue(coordinator, scheduled(coordinator, lambda: {"a": [1, 2]}))
        assert value["a"][1].get() == 2
        assert holds_remote({"x": [1, [value]]})
        assert not holds_remote({"x": [1, [2]]})
        assert repr(value) == f"{value}" == "RemoteValue({'a': [1, 2]})"
        assert list(value["a"]) == [1, 2]
        assert value.fetch() is value.get()
        with pytest.raises(AttributeError, match=r"no attribute 'item'\. Use strategy\.reduce"):
            _ = value.item
        with pytest.raises(rd.InvalidArgumentError, match=r"can't be an argument of a closure"):
            pickle.dumps(value)


# --- the dataset of each worker ---------------------------------------------------------------------------------------


def rows(dataset: rd.Dataset, seed: int = 3) -> list[list[int]]:
    options = rd.Options(seed=seed)
    return [batch.tolist() for batch in dataset.with_options(options)]


def test_parts_of_one_dataset_are_shuffled_alike_and_copies_each_in_its_way() -> None:
    datasets = [rd.Dataset.range(4)] * 3
    assert len(set(_seeds_of(datasets, same=True))) == 1
    assert len(set(_seeds_of(datasets, same=False))) == 3
    assert _seeds_of([rd.Dataset.range(4).with_options(rd.Options(seed=7))] * 2, same=False) == [7, 7]


def test_a_worker_that_starts_again_leaves_out_what_was_used_in_the_same_order() -> None:
    dataset = rd.Dataset.range(20).shuffle(20).batch(2)
    job = _job(dataset, "job", 3, 0, rd.InputOptions(), rd.Timeouts())
    link = mock.MagicMock(key="pass")
    _open_iterator(link, [job], [dataset._op], rd.InputContext(1, 0, 1), drawn=4, generation=1)
    assert [call.args for call in link.keyed.call_args_list] == [("pass-0-0",), ("pass-0-1",)]
    (_, opened) = link.keyed.return_value.call.call_args.args
    (op,) = pickle.loads(opened.ops)
    assert rows(rd.Dataset(op)) == rows(dataset)[4:]


def test_a_function_must_return_a_dataset() -> None:
    unused: Any = None
    made = PerWorkerInput(lambda: 2, unused, unused, rd.Timeouts())
    with pytest.raises(rd.SpecError, match=r"The function must return an rd\.Dataset, got int"):
        made.dataset(lambda: 3, None, rd.InputOptions())  # type: ignore[arg-type, return-value]  # the point of this test


def test_an_iterator_is_for_schedule_only() -> None:
    iterator = PerWorkerIterator("it")
    for use in (next, iter):
        with pytest.raises(rd.FailedPreconditionError, match=r"Give it to coordinator\.schedule in args"):
            use(iterator)
    with pytest.raises(rd.InvalidArgumentError, match=r"It cannot be pickled"):
        pickle.dumps(PerWorkerValue("v"))


# --- workers and servers that are asked for ---------------------------------------------------------------------------

ONE = Cluster(started_here=False, nodes=(Node("a", "10.0.0.1", {"CPU": 4}),))
TWO = Cluster(started_here=False, nodes=(Node("a", "10.0.0.1", {"CPU": 4}), Node("b", "10.0.0.2", {"CPU": 4})))
GPUS = Cluster(started_here=False, nodes=(Node("a", "10.0.0.1", {"CPU": 4, "GPU": 2}),))


def resolver(jobs: dict[str, list[str]], kind: str | None = None, index: int | None = None) -> Any:
    return rd.SimpleClusterResolver(rd.ClusterSpec(jobs), kind, index)


def test_how_many_where_that_is_left_open() -> None:
    cases: list[tuple[Cluster, PsRequest, int, int]] = [
        (ONE, PsRequest(), 3, 1),
        (TWO, PsRequest(), 2, 1),
        (GPUS, PsRequest(), 2, 1),
        (ONE, PsRequest(num_workers=9), 9, 2),
        (ONE, PsRequest(num_workers=1, num_ps=3), 1, 3),
    ]
    for cluster, request, workers, servers in cases:
        plan = plan_ps("name", request, cluster, rd.Timeouts())
        assert (len(plan.setups), plan.num_ps, len(plan.bundles)) == (workers, servers, workers + servers)
        found = [(setup.rank, setup.world_size, len(setup.worker_devices)) for setup in plan.setups]
        assert found == [(number, 1, 1) for number in range(workers)]
        assert plan.setups[0].device == ("cuda:0" if cluster is GPUS else "cpu")
    for num_cores in (2, 3, 5, 9, 64):
        plan = plan_ps("name", PsRequest(), Cluster(False, (Node("a", "b", {"CPU": num_cores}),)), rd.Timeouts())
        assert sum(bundle["CPU"] for bundle in plan.bundles) in (num_cores, num_cores - 1), "they fit one node"


def test_servers_have_bundles_of_their_own_with_what_was_asked_for() -> None:
    request = PsRequest(1, 2, {"CPU": 2}, {"CPU": 1, "memory": 1e9})
    plan = plan_ps("name", request, TWO, rd.Timeouts(), worker_addresses=("10.0.0.2",))
    assert plan.bundles[:2] == ({"CPU": 1, "memory": 1e9},) * 2
    assert plan.bundles[2]["CPU"] == 2
    assert plan.bundles[2]["node:10.0.0.2"] > 0


def test_a_resolver_names_workers_and_servers() -> None:
    found = PsRequest().with_resolver(resolver({"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["d:2"]}))
    assert (found.num_workers, found.num_ps) == (2, 1)
    assert (found.worker_hosts, found.server_hosts) == (("a", "b"), ("d",))


def test_what_cannot_be_asked_for() -> None:
    both = {"worker": ["a:1"], "ps": ["b:1"]}
    bad: list[Any] = [0, -1, 1.5, True]
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: PsRequest().with_resolver(resolver({"worker": ["a:1"]})), r'jobs "worker" and "ps"'),
        (lambda: PsRequest().with_resolver(resolver({**both, "cook": ["c:1"]})), r"leave other jobs out"),
        (lambda: PsRequest().with_resolver(resolver(both, "ps", 0)), r"this process is task ps 0.*no program"),
        (
            lambda: PsRequest(num_ps=2).with_resolver(resolver(both)),
            r"num_ps is 2, but the cluster resolver names 1: b\. Leave",
        ),
        *((partial(PsRequest, num_workers=each), r"num_workers must be >= 1.*at least one worker") for each in bad),
        *((partial(PsRequest, num_ps=each), r"num_ps must be >= 1.*at least one parameter server") for each in bad),
    ]
    for make, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            make()
