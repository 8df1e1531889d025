"""Calls of functions on one replica, the iterators among their arguments, and the summaries that they record."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.checkpoints.replica_loop import ReplicaLoops
from raydist.checkpoints.shards import ShardWriter
from raydist.collectives.base import Membership
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.distributed_dataset import distribute
from raydist.mirroring.messages import StepPayload
from raydist.mirroring.replica import MirrorReplica
from raydist.options import InputOptions
from raydist.replicas.device_copies import Accelerator, DeviceCopies
from raydist.replicas.function_calls import FunctionCalls, ReplicaView
from raydist.replicas.own_state import HostGenerators, PackedTensors, restore_generators
from raydist.replicas.results import StepResult
from raydist.replicas.step import StepHeader
from raydist.replicas.step_summaries import StepSummaries
from raydist.replicas.sync_peers import SyncPeers
from raydist.summary.record import Record
from raydist.summary.recording import SummaryOrder
from raydist.summary.scalars import ScalarValue
from tests.actors.readers.fakes import fake_side
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.replicas.test_sync_peers import NotingReducer

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


def test_iterators_are_let_go_of_whatever_happens() -> None:
    with fake_side(2) as side:
        dataset = distribute(Dataset.range(5).batch(2), side, InputOptions(num_input_workers=0))
        sent: Any = iter(dataset).__reduce__()
        iterator = sent[0](*sent[1])

        def step(batches: Any) -> None:
            assert next(batches).tolist() == [0]
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            Alone().call(step, iterator)
        with pytest.raises(FailedPreconditionError):
            next(iterator)


def test_what_is_the_drivers_is_refused() -> None:
    view = ReplicaView(("CPU:0",))
    for name in ("run", "distribute_dataset", "distribute_datasets_from_function", "stats", "close"):
        with pytest.raises(FailedPreconditionError, match=f"strategy.{name} is for the driver"):
            getattr(view, name)(len)


def test_what_a_writer_has_to_say_is_said_where_steps_are_dispatched(tmp_path: Path) -> None:
    summaries = StepSummaries(lambda: None, lambda: None)
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        summaries.order()
        for _ in range(10):
            summaries.take_records([[Record(writer.key, "loss", 3, ScalarValue(1.0, 1.0), wall_time=1.0)]])
        with pytest.warns(UserWarning, match="'loss' was recorded 10 times at step 3"):
            summaries.order()


def test_mirrored_modules_are_guarded_meanwhile_and_no_longer() -> None:
    alone, found = Alone(), []

    def step(number: int) -> None:
        found.append(alone.mirror.guard().is_on)
        assert 1 // number

    alone.call(step, 1)
    with pytest.raises(ZeroDivisionError):
        alone.call(step, 0)
    assert (found, alone.mirror.guard().is_on, rd.has_strategy()) == ([True, True], False, False)


# --- the state that only one replica has ------------------------------------------------------------------------------


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_generators_go_back_to_every_state_that_was_packed() -> None:
    generators, states, seen = HostGenerators(), [], []
    for number in range(40):
        states.append(generators.pack())
        assert generators.pack() == states[-1]
        seen.append(draws()[: 1 + number % 5])
        if number % 9 == 0:
            random.seed(number)
            np.random.seed(number)
        if number % 3 == 0:
            np.random.randn()  # leaves a second number behind, which changes nothing else
    np.random.seed(0)
    np.random.randn()
    holds_one = generators.pack()
    np.random.randn()
    assert generators.pack() != holds_one
    for number in (39, 3, 20, 0):
        restore_generators(states[number])
        assert draws()[: 1 + number % 5] == seen[number]


def test_tensors_of_every_kind_are_unpacked_as_they_were() -> None:
    tensors = {
        1: torch.arange(10.0).reshape(5, 2)[:1, 1],  # contiguous, with a stride of 2
        2: torch.arange(6).reshape(2, 3).t(),
        3: torch.tensor(True),
        4: torch.zeros(0, 3, dtype=torch.bfloat16),
        5: torch.tensor([1 + 2j, 3 - 1j]).conj(),
        6: torch.eye(3).to_sparse(),
    }
    found = PackedTensors.of(tensors).unpack()
    assert found.keys() == tensors.keys()
    for handle, tensor in tensors.items():
        assert found[handle].dtype == tensor.dtype
        assert torch.equal(found[handle].to_dense(), tensor.to_dense())
