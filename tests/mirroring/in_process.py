"""Driver and replicas of mirrored variables in one process; everything between them goes through pickle."""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, TypeVarTuple

import pytest
import torch
from cloudpickle import cloudpickle
from torch import nn

from raydist.core.values import PerReplica
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.messages import MirrorCalls, StepPayload, answer
from raydist.mirroring.replica import MirrorReplica

T = TypeVar("T")
Args = TypeVarTuple("Args")


class InProcessLink:
    """A `ReplicaLink` to replicas in this process. Notes the calls by method, and how many tensors came."""

    def __init__(self, num_replicas: int) -> None:
        self.replicas = [MirrorReplica(rank, world_size=num_replicas) for rank in range(num_replicas)]
        self.calls: list[str] = []
        self.fetched: list[int] = []

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    def call(self, rank: int, method: Callable[[MirrorCalls, *Args], T], *args: *Args) -> T:
        self.calls.append(method.__name__)
        there, given = _copied((method, args))
        found: T = _copied(answer(self.replicas[rank], there, *given))
        if isinstance(found, dict) and method.__name__ == "tensor_images":
            self.fetched.append(len(found))
        return found

    def call_all(self, method: Callable[[MirrorCalls, *Args], T], *args: *Args) -> list[T]:
        return [self.call(rank, method, *args) for rank in range(self.num_replicas)]


class _ClassTracker:
    """cloudpickle's record of the classes that it made: in one process, replicas must not find the driver's classes."""

    def __init__(self) -> None:
        self._by_id: Any = weakref.WeakValueDictionary()
        self._by_class: Any = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        driver = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID, cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID = self._by_id
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS = self._by_class
        try:
            yield
        finally:
            cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID, cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS = driver


def _copied(value: T) -> T:
    copy: T = pickle.loads(pickle.dumps(value))
    return copy


class Mirror:
    """A small strategy: runs a function on every replica, one after the other. Gradients are not reduced."""

    def __init__(self, num_replicas: int = 2, name: str = "TestStrategy", *, row_holders: int = 0) -> None:
        self.link = InProcessLink(num_replicas)
        self.driver = MirrorDriver(name, self.link, row_holders=lambda: row_holders)
        self.payloads: list[StepPayload] = []
        self._class_trackers = [_ClassTracker() for _ in range(num_replicas)]

    @property
    def replicas(self) -> Sequence[MirrorReplica]:
        return self.link.replicas

    def scope(self) -> Any:
        return self.driver.scope()

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        payload = self.driver.prepare(fn, args, kwargs)
        self.driver.dispatched()
        self.payloads.append(payload)
        return [self._run_one(rank, payload) for rank in range(self.link.num_replicas)]

    def _run_one(self, rank: int, payload: StepPayload) -> Any:
        parts = [value.values[rank] for value in payload.per_replica]
        with self._class_trackers[rank].swapped():
            function, args, kwargs = self.replicas[rank].apply(_copied(payload), parts)
        guard = self.replicas[rank].guard()
        guard.is_on = True
        try:
            result = function(*args, **kwargs)
        finally:
            guard.is_on = False
        self.replicas[rank].after_run()
        return result

    def dispatch_within(self, monkeypatch: pytest.MonkeyPatch, method: str, step: Callable[[], object]) -> None:
        """Have another thread's step dispatched while the driver fetches: once, behind what the replicas answer."""
        call = self.link.call

        def call_slowly(rank: int, called: Any, *args: Any) -> Any:
            answered = call(rank, called, *args)
            if called.__name__ == method:
                monkeypatch.undo()
                step()
            return answered

        monkeypatch.setattr(self.link, "call", call_slowly)

    @property
    def bytes_of_last(self) -> dict[str, int]:
        last = self.payloads[-1]
        return {name: len(getattr(last, name)) for name in ("bundle", "writes", "function", "arguments")}


def rank_of(mirror: Mirror) -> PerReplica:
    """An argument that is each replica's number."""
    return PerReplica(list(range(mirror.link.num_replicas)))


def linear(mirror: Mirror, inputs: int = 2, outputs: int = 1) -> nn.Linear:
    """A mirrored layer with weights 1, 2, 3, ... and no bias."""
    with mirror.scope():
        layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, 1 + inputs * outputs).reshape(outputs, inputs))
    return layer
