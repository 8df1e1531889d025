"""What is asked of a parameter server about optimizers: their groups, and what they remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from raydist.parameter_servers.requests import PushKey, Sender, ServerRequest

__all__ = ["AddOptimizer", "OptimizerGroup", "OptimizerState", "SetOptimizerState", "WriteStates"]


@final
@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """One of an optimizer's `param_groups`, as far as one server has it.

    Attributes:
        options: Everything but `params`: lr, weight_decay, ...
        slices: Numbers of the slices in it.
        tables: Handles of the embedding tables in it.
    """

    options: Mapping[str, Any]
    slices: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class AddOptimizer(ServerRequest):
    """Have an optimizer, or have its groups changed: slices that are new are added, what is remembered is kept.

    Attributes:
        handle: What driver and workers call it.
        kind: Pickle (cloudpickle) of its class.
        groups: In the optimizer's order.
    """

    handle: int
    kind: bytes
    groups: tuple[OptimizerGroup, ...]


@final
@dataclass(frozen=True, slots=True)
class OptimizerState(ServerRequest):
    """What an optimizer remembers; answer: `value` is a dict slice number -> its `state`, tensors included."""

    optimizer: int


@final
@dataclass(frozen=True, slots=True)
class SetOptimizerState(ServerRequest):
    """Replace what an optimizer remembers.

    Attributes:
        optimizer: Its handle.
        states: By slice number, tensors included.
    """

    optimizer: int
    states: Mapping[int, Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True)
class WriteStates(ServerRequest):
    """Write what a step has changed by hand of what optimizers remember.

    Attributes:
        sender: Who writes.
        key: Which change it is.
        states: By optimizer and slice number, all that is remembered of that slice from now on; of others it stays.
    """

    sender: Sender
    key: PushKey
    states: Mapping[int, Mapping[int, Mapping[str, Any]]]
