"""Optimizer states within a closure: read from the servers at the first access, and written back if changed."""

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

_LOOKS = (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
)


@final
class PsOptimizerState(defaultdict[Any, Any]):
    """A dict like torch's optimizer state that calls `ask`, if there is one, before the first access of any kind.

    >>> state = PsOptimizerState()
    >>> state.ask = lambda: state.update(a={"step": 1})
    >>> "a" in state, state.ask
    (True, None)
    """

    ask: Callable[[], None] | None = None  # fills the dict with the servers' state

    def __init__(self, default_factory: Callable[[], Any] | None = dict, content: Any = ()) -> None:
        super().__init__(default_factory, content)  # torch's own defaultdict copies itself with these arguments

    def open(self) -> None:
        """Fill the dict, if it is not filled yet."""
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


def _opening(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    @functools.wraps(plain)
    def look(state: PsOptimizerState, *args: Any, **kwargs: Any) -> Any:
        state.open()
        return plain(state, *args, **kwargs)

    return look


for _name in _LOOKS:
    setattr(PsOptimizerState, _name, _opening(_name))


_States = dict[torch.Tensor, dict[str, Any]]


@final
class ClosureStates:
    """States of one worker's optimizers. A closure that does not access them causes no requests."""

    def __init__(self, optimizers: PsOptimizers) -> None:
        self._optimizers = optimizers
        self._seen: dict[int, _Seen] = {}

    def begin(self) -> None:
        """Prepare for a closure: its first access to a state reads this state from the servers."""
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
        self._seen.clear()

    def _read(self, optimizer: torch.optim.Optimizer, state: PsOptimizerState) -> None:
        if state is not _state_of(optimizer):
            return  # the closure has replaced the state
        state.update(self._asked(optimizer))
        self._seen[id(optimizer)] = _Seen(state)

    def _asked(self, optimizer: torch.optim.Optimizer) -> _States:
        found = self._optimizers.states_of(optimizer)
        return {parameter: _beside(parameter, state) for parameter, state in found.items()}

    def write(self, key: PushKey) -> None:
        """Write the states that the closure has changed to the servers."""
        changed = {}
        for optimizer in self._optimizers.everyone():
            states = self._written(optimizer)
            if states:
                changed[optimizer] = states
        if changed:
            self._optimizers.write_states(changed, key)

    def _written(self, optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        state = _state_of(optimizer)
        if not isinstance(state, PsOptimizerState):
            known = _Seen(self._asked(optimizer))
            optimizer.state = own = PsOptimizerState()
            own.update(state)
        elif (found := self._seen.get(id(optimizer))) is not None:
            known, own = found, state
        else:
            return {}
        self._seen[id(optimizer)] = _Seen(own)
        return known.changes(own)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Refresh the states that the closure holds, after the servers have stepped."""
        if id(optimizer) not in self._seen:
            return
        state = _state_of(optimizer)
        fresh = self._asked(optimizer)
        for parameter in [known for known in state if known not in fresh]:
            del state[parameter]
        for parameter, values in fresh.items():
            _take_over(state[parameter], values)
        self._seen[id(optimizer)] = _Seen(state)


@final
class _Seen:
    """Copies of the states that a closure had read, to find changes."""

    def __init__(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        self._states = {parameter: dict(_images(state)) for parameter, state in states.items()}

    def changes(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Return the present state of each parameter whose state has changed."""
        return {
            parameter: now
            for parameter in dict.fromkeys([*self._states, *states])
            if not _same(self._states.get(parameter, {}), now := states.get(parameter, {}))
        }


def _images(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        yield name, TensorImage.of(value.detach().clone()) if isinstance(value, torch.Tensor) else pickle.dumps(value)


def _same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return before.keys() == now.keys() and all(_shows(before[name], value) for name, value in now.items())


def _shows(before: Any, now: Any) -> bool:
    if isinstance(before, TensorImage):
        return isinstance(now, torch.Tensor) and before.shows(now)
    return not isinstance(now, torch.Tensor) and bool(before == pickle.dumps(now))


def _take_over(held: dict[str, Any], fresh: Mapping[str, Any]) -> None:
    """Update a dictionary and its tensors in place: the closure may hold references to them."""
    for name in [known for known in held if known not in fresh]:
        del held[name]
    for name, value in fresh.items():
        mine = held.get(name)
        if isinstance(mine, torch.Tensor) and _fits(mine, value):
            with torch.no_grad():
                mine.copy_(value)
        else:
            held[name] = value


def _fits(mine: torch.Tensor, value: Any) -> bool:
    fits = isinstance(value, torch.Tensor) and (mine.dtype, mine.shape) == (value.dtype, value.shape)
    return fits and mine.layout is torch.strided is value.layout


def _beside(parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Move state tensors of the parameter's shape to the parameter's device, as torch does."""
    return {
        name: value.to(parameter.device)
        if isinstance(value, torch.Tensor) and name != "step" and value.shape == parameter.shape
        else value
        for name, value in state.items()
    }


def _state_of(optimizer: torch.optim.Optimizer) -> Any:
    return attributes(optimizer)["state"]
