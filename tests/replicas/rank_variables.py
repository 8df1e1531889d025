"""Ranks as threads, each with mirrored objects of its own: what rules see, without actors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.differentiable import all_gather
from raydist.mirroring.replica import MirrorReplica
from raydist.replicas.rules import VariablesView
from tests.collectives.threads import run_ranks

T = TypeVar("T")
Make = Callable[[], Sequence[Any]]


def gather_objects(communicator: Communicator, value: Any) -> list[Any]:
    """Every rank's value."""
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = all_gather(communicator, torch.tensor([len(payload)]), 0, None).tolist()
    parts = all_gather(communicator, payload, 0, None).split(sizes)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def on_ranks(world_size: int, make: Make, body: Callable[..., T]) -> list[T]:
    """`body(variables, *objects)` on every rank, with what `make` gives, mirrored; results in rank order."""

    def main(communicator: Communicator) -> T:
        objects = make()
        mirror = MirrorReplica(communicator.rank)
        mirror._applier.add(list(enumerate(objects)), [], {})
        rows = (1,) * world_size
        view = VariablesView(communicator, mirror, lambda value: gather_objects(communicator, value), lambda: rows)
        return body(view, *objects)

    return run_ranks(world_size, main)
