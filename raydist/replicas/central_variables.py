"""Optimizer steps on replica 0 only: it applies the reduced gradients and broadcasts the parameters.

Every replica computes with a copy of the parameters on its device. Only replica 0 has the optimizers' state, in host
memory, and only replica 0 runs `optimizer.step()`, on the CPU. The other replicas wait for the new parameters.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from raydist.collectives.translation import describe_each
from raydist.core.errors import CollectiveMismatchError
from raydist.replicas.rules import ReplicaVariables, StrategyHooks

_OWNER = 0


@final
class CentralVariables(StrategyHooks):
    """Strategy hooks that keep the state of the optimizers on replica 0 only."""

    replicates_optimizer_state = False

    def step_optimizer(
        self,
        variables: ReplicaVariables,
        optimizer: torch.optim.Optimizer,
        step: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if variables.num_replicas == 1:
            return step(*args, **kwargs)
        # A closure runs the model, and collectives in it need all replicas. So each replica steps, with its own state.
        if any(map(callable, [*args, *kwargs.values()])):
            sizes = _gather_numbers(variables, optimizer, len(optimizer.state))
            if len(set(sizes)) > 1:
                states = variables.gather_objects(optimizer.state_dict() if variables.rank == _OWNER else None)
                optimizer.load_state_dict(states[_OWNER])
            return step(*args, **kwargs)
        result = None
        if variables.rank == _OWNER:
            with _on_cpu(optimizer):
                result = step(*args, **kwargs)
        else:
            optimizer.state.clear()  # a restore or a failed step leaves a state on all replicas
        returns_value = _gather_numbers(variables, optimizer, int(result is not None))[_OWNER]
        _broadcast(variables, _parameters_of(optimizer))
        return variables.gather_objects(result)[_OWNER] if returns_value else None


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextlib.contextmanager
def _on_cpu(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the parameters, gradients and state of an optimizer in host memory within the context.

    On exit, the new values are copied to the devices of the parameters. The state stays in host memory.
    """
    on_device = [(each, each.data, each.grad) for each in _parameters_of(optimizer) if each.device.type != "cpu"]
    for state in optimizer.state.values():
        state.update({key: value.cpu() for key, value in state.items() if isinstance(value, torch.Tensor)})
    try:
        for parameter, data, gradient in on_device:
            parameter.grad = None  # a gradient must be on the device of its parameter
            parameter.data = data.cpu()
            parameter.grad = None if gradient is None else gradient.cpu()
        yield
    finally:
        for parameter, data, gradient in on_device:
            data.copy_(parameter.data)
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient


def _broadcast(variables: ReplicaVariables, parameters: Sequence[torch.Tensor]) -> None:
    """Replace the parameters of every replica by replica 0's."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        held = [parameter.detach() for parameter in parameters if parameter.dtype is dtype]
        flat = torch.cat([each.reshape(-1) for each in held])
        variables.broadcast(flat, _OWNER)
        if variables.rank != _OWNER:
            for each, values in zip(held, flat.split([each.numel() for each in held]), strict=True):
                each.copy_(values.view_as(each))


def _gather_numbers(variables: ReplicaVariables, optimizer: torch.optim.Optimizer, number: int) -> list[int]:
    """Return the `number` of each replica, in rank order. Raise if the replicas step different optimizers."""
    title = _title_of(optimizer, variables)
    rows = variables.gather_numbers(title, zlib.crc32(title.encode()), number)
    if len({code for code, _ in rows}) > 1:
        titles = [_title_of(each, variables) for each in variables.optimizers()]
        known = {zlib.crc32(title.encode()): title for title in titles}
        listed = describe_each([known.get(code, "something else") for code, _ in rows], "replica")
        raise CollectiveMismatchError(
            f"All replicas must step the same optimizer together, but they called: {listed}. Look for a branch that "
            "only some replicas take."
        )
    return [given for _, given in rows]


def _title_of(optimizer: torch.optim.Optimizer, variables: ReplicaVariables) -> str:
    numbers = [number for number, known in enumerate(variables.optimizers()) if known is optimizer]
    return f"optimizer.step() of {type(optimizer).__name__} {numbers[0] if numbers else '?'}"
