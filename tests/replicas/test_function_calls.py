"""One replica without others, whose gradients nobody reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import raydist as rd
from raydist.checkpoints.replica_loop import ReplicaLoops
from raydist.checkpoints.shards import ShardWriter
from raydist.collectives.base import Membership
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.mirroring.messages import StepPayload
from raydist.mirroring.replica import MirrorReplica
from raydist.replicas.device_copies import Accelerator, DeviceCopies
from raydist.replicas.function_calls import FunctionCalls
from raydist.replicas.replica_view import ReplicaView
from raydist.replicas.results import StepResult
from raydist.replicas.step import StepHeader
from raydist.replicas.sync_peers import SyncPeers
from raydist.summary.recording import SummaryOrder, condition, step_sink
from raydist.utils.torch_modes import TorchModes
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.replicas.noting_reducer import NotingReducer

CPU = torch.device("cpu")


class Alone:
    def __init__(self) -> None:
        group = LocalGroup(LocalHub(), Membership("alone", 0, 0, 1), 10.0).start()
        self.mirror = MirrorReplica(0)
        policy = NonfinitePolicy(lambda _: [])
        self.peers = SyncPeers(group, NotingReducer(), CPU, self.mirror, policy)  # type: ignore[arg-type]  # a stand-in
        saves = mock.create_autospec(ShardWriter, instance=True)
        loops = ReplicaLoops(saves)
        self.calls = FunctionCalls(self.mirror, saves, loops, DeviceCopies(CPU), Accelerator("cpu"), 1.0)
        self.calls.join(ReplicaView(("cpu",), list), self.peers)

    def call(self, fn: Callable[..., Any], *args: Any, **header: Any) -> StepResult:
        said = StepHeader(0, 0, StepPayload(), **header)
        return self.calls.pack(self.calls.call(said, self.peers, fn, args, {}), said, self.peers)


def test_a_function_is_called_as_a_replica_of_its_group() -> None:
    def step(number: int) -> tuple[int, bool]:
        context = rd.get_replica_context()
        return number + context.num_replicas_in_sync, rd.in_cross_replica_context()

    result = Alone().call(step, 4)
    assert result.leaves == (5, False)
    assert not rd.has_strategy()
    assert step_sink() is None


@pytest.mark.parametrize("fails", [False, True])
def test_mirrored_modules_are_guarded_meanwhile_and_no_longer(fails: bool) -> None:
    alone, found = Alone(), []

    def step() -> None:
        found.append(alone.mirror.guard().is_on)
        if fails:
            raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            alone.call(step)
    else:
        alone.call(step)
    assert (found, alone.mirror.guard().is_on, rd.has_strategy()) == ([True], False, False)


def test_what_the_driver_had_set_holds_inside() -> None:
    def step() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), condition()

    with torch.no_grad():
        modes = TorchModes.here()
    assert Alone().call(step, modes=modes).leaves == (False, True)
    assert Alone().call(step, summaries=SummaryOrder(wanted=False)).leaves == (True, False)
    assert Alone().call(step, modes=modes, summaries=SummaryOrder(wanted=False)).leaves == (False, False)
    assert Alone().call(step).leaves == (True, True)


def test_what_was_recorded_goes_with_the_result_of_its_step(tmp_path: Any) -> None:
    alone = Alone()

    def step() -> None:
        rd.summary.scalar("loss", 2.0, step=3)

    with rd.summary.create_file_writer(tmp_path) as writer:
        order = SummaryOrder(writer.key, 3)
        (record,) = alone.call(step, summaries=order).summaries
        assert (record.name, record.step) == ("loss", 3)
        assert alone.call(lambda: None).summaries == ()

        def fail() -> None:
            step()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            alone.call(fail, summaries=order)
        alone.calls.drop_records()
        assert alone.call(lambda: None).summaries == ()


@pytest.mark.parametrize(("rows", "absent"), [(None, False), ((3,), False), ((0,), False)])
def test_rows_go_with_the_result(rows: tuple[int, ...] | None, absent: bool) -> None:
    result = Alone().call(lambda: 1, rows=rows)
    assert (result.rows, result.absent) == (None if rows is None else rows[0], absent)
