"""Calls of the driver half to the replica half."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from raydist.errors import FailedPreconditionError
from raydist.mirroring.calls import MirrorCalls, answer
from raydist.mirroring.on_replica.replica import MirrorReplica

CALLS = [method for name, method in vars(MirrorCalls).items() if inspect.isfunction(method) and name[0] != "_"]


@pytest.mark.parametrize("method", CALLS, ids=lambda method: str(method.__name__))
def test_every_call_travels_by_name(method: Callable[..., Any]) -> None:
    assert pickle.loads(pickle.dumps(method)) is method


def test_a_replica_answers_with_its_own_method() -> None:
    replica = MirrorReplica(0)
    assert answer(replica, MirrorCalls.tensor_images, [7]) == {}


@pytest.mark.parametrize("method", [MirrorReplica.parameters, MirrorReplica.tensor_images, len])
def test_nothing_else_is_answered(method: Any) -> None:
    with pytest.raises(FailedPreconditionError, match=r"raydist bug: .* methods of MirrorCalls only, got <"):
        answer(MirrorReplica(0), method)
