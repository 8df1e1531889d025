"""A manager's part in a run that draws batches itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.loops.managed_loop import ManagedLoop
from raydist.checkpoints.loops.orders import IteratorPlace, WantedSave
from raydist.checkpoints.managing.saves import ManagedSaves
from raydist.checkpoints.retention import Retention
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.save_interval import SaveInterval
from tests.checkpoints.loops.in_process import Host


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    made = RunDirectory(str(tmp_path), "ckpt", Retention(None))
    made.take()
    yield made
    made.give_back()


def managed(run: RunDirectory, iterators: list[Any], **objects: Any) -> tuple[ManagedLoop, ManagedSaves]:
    saves = ManagedSaves(contents_of(rd.Checkpoint(**objects)), run, SaveInterval(), None)
    return ManagedLoop("key", saves, 42, iterators, asynchronous=True), saves


def test_what_the_driver_has_is_that_of_the_runs_beginning(run: RunDirectory) -> None:
    state = rd.State(epoch=1)
    part, _ = managed(run, [], state=state)
    host = Host(1, dict, [])
    order = part.order(host)
    assert order.objects == {}
    state.epoch = 2
    outcome = part.write(WantedSave("t", "key", 5, 9, None, ()), lambda request: _Shares(host, request), None)
    host.close()
    assert outcome.error is None
    again = rd.State(epoch=0)
    rd.Checkpoint(state=again).restore(run.path_to(5))
    assert again.epoch == 1
    assert run.find()[0].details["calls"] == 9


class _Shares:
    """What one replica has written."""

    def __init__(self, host: Host, request: Any) -> None:
        self.host, self.token = host, request.token
        host.ranks[0].writer.begin(request, {}, {})

    def wait(self) -> Any:
        found = None
        while found is None:
            found = self.host.shares(0, self.token)[0]
        return [found]


def test_datasets_and_iterators_are_where_the_replicas_are(run: RunDirectory) -> None:
    data = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(8).batch(2))
    iterator, other = iter(data), iter(rd.Dataset.range(3))
    next(iterator)
    place = IteratorPlace(iterator.state_dict(), False)
    part, _ = managed(run, [iterator], data=data, iterator=iterator, other=other)
    host = Host(1, dict, [])
    part.order(host)
    next(iterator)  # here; the replicas are elsewhere
    wanted = WantedSave("t", "key", 1, 1, None, (place,))
    assert part.write(wanted, lambda request: _Shares(host, request), None).error is None
    ended = WantedSave("u", "key", 2, 2, None, (IteratorPlace(place.state, True),))
    assert part.write(ended, lambda request: _Shares(host, request), None).error is None
    host.close()
    rd.Checkpoint(data=data).restore(run.path_to(1), only="data")
    assert [batch.tolist() for batch in data] == [[2, 3], [4, 5], [6, 7]]
    rd.Checkpoint(data=data).restore(run.path_to(2), only="data")
    assert len(list(data)) == 4, "an epoch that has ended is followed by a new one"


def test_replicas_save_pending_gradients_beside_the_modules(run: RunDirectory) -> None:
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    saves = ManagedSaves(
        contents_of(rd.Checkpoint(model=model, other=other, gradients=True)), run, SaveInterval(), None
    )
    part = ManagedLoop("key", saves, 42, [], asynchronous=True)
    host = Host(1, dict, [(model, 1)])
    host.saved_how = "whole"
    order = part.order(host)
    host.close()
    assert order.objects == {"model": 1}
    assert order.gradients == {"gradients.model": 1}  # those of the other one are the driver's, as it is itself
    assert order.terms.whole == {"model", "gradients.model"}


@pytest.mark.parametrize(("counter", "told"), [(None, (None, 0)), ("known", (5, 0)), (lambda: 7, (None, 7))])
def test_what_only_the_driver_counts_is_told_as_it_is_when_the_run_begins(
    run: RunDirectory, counter: Any, told: tuple[int | None, int]
) -> None:
    saves = ManagedSaves(contents_of(rd.Checkpoint(state=rd.State())), run, SaveInterval(), counter)
    host = Host(1, dict, [("known", 5)])
    order = ManagedLoop("key", saves, 42, [], asynchronous=True).order(host)
    host.close()
    assert (order.counter, order.step) == told
    assert order.counts_calls == (counter is None)


def test_modules_whose_variables_alone_are_used_are_sent_as_well(run: RunDirectory) -> None:
    inner, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    outer, norm = torch.nn.Sequential(inner), torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    part, _ = managed(run, [], inner=inner, outer=outer, norm=norm, other=other, state=rd.State())
    host = Host(1, dict, [(inner, 1), (inner.weight, 2), (norm[0].running_mean, 3)])
    assert part.unreached(host) == [outer, norm]
    host.close()


def test_a_failure_is_told_and_does_not_keep_the_process(run: RunDirectory, tmp_path: Path) -> None:
    part, saves = managed(run, [], state=rd.State())
    host = Host(1, dict, [])
    part.order(host)
    (tmp_path / "ckpt-4").write_text("in the way")
    wanted = WantedSave("t", "key", 4, 1, None, (), leaving=True)
    outcome = part.write(wanted, lambda request: _Shares(host, request), "it received SIGTERM")
    host.close()
    assert outcome.failures == 1
    assert outcome.left is part.left
    assert "it received SIGTERM. It could not be saved" in str(outcome.left)
    saves.writer.close()  # nobody is told again
