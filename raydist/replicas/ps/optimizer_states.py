"""Optimizer states in a closure: a worker reads them from the servers at the first access, and writes changes back."""

from __future__ import annotations

import functools
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch

from raydist.mirroring.messages import TensorImage
from raydist.parameter_servers.requests import PushKey
from raydist.pickling.attribute_table import attributes
from raydist.replicas.ps.optimizers import PsOptimizers

_DICT_METHODS = (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
)


@final
class PsOptimizerState(defaultdict[Any, Any]):
    """A dict like the state of torch's optimizers that calls `ask`, if set, before the first access.

    >>> state = PsOptimizerState()
    >>> state.ask = lambda: state.update(a={"step": 1})
    >>> "a" in state, state.ask
    (True, None)
    """

    ask: Callable[[], None] | None = None  # fills the dict with the servers' state

    def __init__(self, default_factory: Callable[[], Any] | None = dict, content: Any = ()) -> None:
        super().__init__(default_factory, content)  # the arguments with which defaultdict copies itself

    def open(self) -> None:
        """Call `ask` and unset it, if it is set."""
        ask, self.ask = self.ask, None
        if ask is not None:
            ask()

    def shut(self, ask: Callable[[], None] | None) -> None:
        """Empty the dict, and call `ask` at the next access."""
        self.ask = None
        self.clear()
        self.ask = ask

    def copy(self) -> PsOptimizerState:
        """Return a copy without `ask`."""
        return PsOptimizerState(self.default_factory, self.items())

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())


def _with_open(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    @functools.wraps(plain)
    def method(state: PsOptimizerState, *args: Any, **kwargs: Any) -> Any:
        state.open()
        return plain(state, *args, **kwargs)

    return method


for _name in _DICT_METHODS:
    setattr(PsOptimizerState, _name, _with_open(_name))


_States = dict[torch.Tensor, dict[str, Any]]


@final
class ClosureStates:
    """States of one worker's optimizers. A closure that accesses no state causes no requests."""

    def __init__(self, optimizers: PsOptimizers) -> None:
        self._optimizers = optimizers
        self._snapshots: dict[int, _Snapshot] = {}

    def begin(self) -> None:
        """Prepare for a closure: the first access to an optimizer's state reads the state from the servers."""
        for optimizer in self._optimizers.everyone():
            state = _state_of(optimizer)
            if not isinstance(state, PsOptimizerState):
                state = optimizer.state = PsOptimizerState()
            state.shut(functools.partial(self._read, optimizer, state))

    def end(self) -> None:
        """Drop the states of the ended closure."""
        for optimizer in self._optimizers.everyone():
            state = _state_of(optimizer)
            if isinstance(state, PsOptimizerState):
                state.shut(None)
            else:
                state.clear()
        self._snapshots.clear()

    def _read(self, optimizer: torch.optim.Optimizer, state: PsOptimizerState) -> None:
        if state is not _state_of(optimizer):
            return  # the closure has replaced the state
        state.update(self._fetch(optimizer))
        self._snapshots[id(optimizer)] = _Snapshot(state)

    def _fetch(self, optimizer: torch.optim.Optimizer) -> _States:
        found = self._optimizers.states_of(optimizer)
        return {parameter: _to_device_of(parameter, state) for parameter, state in found.items()}

    def write(self, key: PushKey) -> None:
        """Write the states that the closure has changed to the servers."""
        changed = {}
        for optimizer in self._optimizers.everyone():
            states = self._take_changes(optimizer)
            if states:
                changed[optimizer] = states
        if changed:
            self._optimizers.write_states(changed, key)

    def _take_changes(self, optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        state = _state_of(optimizer)
        if not isinstance(state, PsOptimizerState):
            known = _Snapshot(self._fetch(optimizer))
            optimizer.state = own = PsOptimizerState()
            own.update(state)
        elif (found := self._snapshots.get(id(optimizer))) is not None:
            known, own = found, state
        else:
            return {}
        self._snapshots[id(optimizer)] = _Snapshot(own)
        return known.changes(own)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Refresh the states that the closure has read, after the servers have stepped the optimizer."""
        if id(optimizer) not in self._snapshots:
            return
        state = _state_of(optimizer)
        fresh = self._fetch(optimizer)
        for parameter in [known for known in state if known not in fresh]:
            del state[parameter]
        for parameter, values in fresh.items():
            _update_in_place(state[parameter], values)
        self._snapshots[id(optimizer)] = _Snapshot(state)


@final
class _Snapshot:
    """Copies of states as a closure read them, to find changes."""

    def __init__(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        self._states = {parameter: dict(_images(state)) for parameter, state in states.items()}

    def changes(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Return the current state of each parameter whose state has changed."""
        return {
            parameter: now
            for parameter in dict.fromkeys([*self._states, *states])
            if not _states_equal(self._states.get(parameter, {}), now := states.get(parameter, {}))
        }


def _images(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        yield name, TensorImage.of(value.detach().clone()) if isinstance(value, torch.Tensor) else pickle.dumps(value)


def _states_equal(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return before.keys() == now.keys() and all(_values_equal(before[name], value) for name, value in now.items())


def _values_equal(before: Any, now: Any) -> bool:
    if isinstance(before, TensorImage):
        return isinstance(now, torch.Tensor) and before.shows(now)
    return not isinstance(now, torch.Tensor) and bool(before == pickle.dumps(now))


def _update_in_place(state: dict[str, Any], fresh: Mapping[str, Any]) -> None:
    """Update a state and its tensors in place: the closure may hold references to both."""
    for name in [known for known in state if known not in fresh]:
        del state[name]
    for name, value in fresh.items():
        tensor = state.get(name)
        if isinstance(tensor, torch.Tensor) and _can_copy(tensor, value):
            with torch.no_grad():
                tensor.copy_(value)
        else:
            state[name] = value


def _can_copy(tensor: torch.Tensor, value: Any) -> bool:
    fits = isinstance(value, torch.Tensor) and (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
    return fits and tensor.layout is torch.strided is value.layout


def _to_device_of(parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Move state tensors of the parameter's shape to the parameter's device, as torch does."""
    return {
        name: value.to(parameter.device)
        if isinstance(value, torch.Tensor) and name != "step" and value.shape == parameter.shape
        else value
        for name, value in state.items()
    }


def _state_of(optimizer: torch.optim.Optimizer) -> Any:
    return attributes(optimizer)["state"]
