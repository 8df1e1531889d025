"""Requests to a parameter server about optimizers: their groups and their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from raydist.parameter_servers.requests import PushKey, Sender, ServerRequest

__all__ = ["AddOptimizer", "OptimizerGroup", "OptimizerState", "SetOptimizerState", "WriteStates"]


@final
@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """One server's part of one of an optimizer's `param_groups`.

    Attributes:
        options: Everything but `params`: lr, weight_decay, ...
        slices: Numbers of the group's slices.
        tables: Handles of the group's embedding tables.
    """

    options: Mapping[str, Any]
    slices: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class AddOptimizer(ServerRequest):
    """Add an optimizer, or change the groups of a known one: new slices are added, states are kept.

    Attributes:
        handle: Handle of the optimizer, the same on the driver and all workers.
        kind: Pickle (cloudpickle) of the optimizer's class.
        groups: Groups in the optimizer's order.
    """

    handle: int
    kind: bytes
    groups: tuple[OptimizerGroup, ...]


@final
@dataclass(frozen=True, slots=True)
class OptimizerState(ServerRequest):
    """Read an optimizer's state; answer: `value` is a dict slice number -> `state` of the slice, tensors included."""

    optimizer: int


@final
@dataclass(frozen=True, slots=True)
class SetOptimizerState(ServerRequest):
    """Replace an optimizer's state.

    Attributes:
        optimizer: Handle of the optimizer.
        states: States by slice number, tensors included.
    """

    optimizer: int
    states: Mapping[int, Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True)
class WriteStates(ServerRequest):
    """Write the optimizer states that a step has changed by hand.

    Attributes:
        sender: The writing worker.
        key: Key of the change.
        states: By optimizer and slice number, the slice's new state; other slices keep their states.
    """

    sender: Sender
    key: PushKey
    states: Mapping[int, Mapping[int, Mapping[str, Any]]]
