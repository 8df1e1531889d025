"""The objects of a checkpoint: their names, `rd.State`, and reading and loading the state of each kind."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import nn

from raydist.checkpoints.parameter_names import (
    compiled_names,
    fitting_entries,
    has_compiled,
    keep_types,
    optimizer_entries,
    optimizer_state,
    parameter_names,
    plain_name,
    plain_names,
)
from raydist.core.errors import InvalidArgumentError
from raydist.utils.sharded_tensors import STAGES, is_sharded, shard_like, shard_state
from raydist.utils.stage_tensors import states_of_all

OWNER = "_raydist_owner"
"""Class attribute of a mirrored object with the strategy that mirrors it and knows the per-replica states."""

RESTORED_BY_RANK = "_raydist_shares"
"""Attribute of a metric with the per-replica states that a checkpoint contained, in rank order."""


def states_by_rank(metric: Any) -> list[dict[str, Any]]:
    """Return the metric's state on each of several replicas, in rank order; [] if not mirrored or changed here."""
    owner = vars(type(metric)).get(OWNER)
    found: list[dict[str, Any]] = [] if owner is None else owner.states_by_rank(metric)
    return found if len(found) > 1 else []


_METHODS = ("state_dict", "load_state_dict")
_MOST_LEVELS = 50


@final
class State:
    """Named values in a checkpoint, for the progress of a program: an epoch, a best score, a count.

    Args:
        values: JSON values (numbers, text, truth values, None, lists, dicts with text as keys) by name.

    Raises:
        InvalidArgumentError: A value is none of these, or a name is reserved; the message names the entry.

    >>> progress = rd.State(epoch=0, best=0.0)
    >>> progress.epoch += 1
    >>> progress
    State(epoch=1, best=0.0)

    Source: `tf.Variable`s in a tf.train.Checkpoint.
    """

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in _METHODS:
            raise InvalidArgumentError(
                f"A value of rd.State may have any name that does not begin with '_' and is none of {_METHODS}, got "
                f"{name!r}. Give it another one."
            )
        _require_json(value, name, 0)
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"This rd.State has {sorted(self.__dict__)}, and no {name!r}. Assign it first.")

    def __repr__(self) -> str:
        return f"State({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name.

        Returns:
            A new dict; lists and dicts in it are not copied.

        Raises:
            InvalidArgumentError: A list or a dict now contains a value that is not JSON.

        >>> rd.State(epoch=3).state_dict()
        {'epoch': 3}

        Source: raydist's own; torch.nn.Module.state_dict.
        """
        for name, value in self.__dict__.items():
            _require_json(value, name, 0)
        return dict(self.__dict__)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the values of `state`. Values that `state` lacks stay unchanged.

        Args:
            state: Result of `state_dict`.

        Raises:
            InvalidArgumentError: A value is not JSON; nothing is changed.

        >>> progress = rd.State(epoch=0)
        >>> progress.load_state_dict({"epoch": 3})
        >>> progress.epoch
        3

        Source: raydist's own; torch.nn.Module.load_state_dict.
        """
        for name, value in State(**state).__dict__.items():
            setattr(self, name, value)


def _require_json(value: Any, path: str, level: int) -> None:
    if level > _MOST_LEVELS:
        raise InvalidArgumentError(
            f"A value of rd.State may be nested {_MOST_LEVELS} levels deep, {path:.100} is deeper."
        )
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for index, part in enumerate(value):
            _require_json(part, f"{path}.{index}", level + 1)
    elif type(value) is dict and all(type(key) is str for key in value):
        for key, part in value.items():
            _require_json(part, f"{path}.{key}", level + 1)
    else:
        raise InvalidArgumentError(
            f"The entry {path!r} of rd.State must be a JSON value (a number, text, True or False, None, a list, a dict "
            f"with text as keys), got {value!r:.100} ({type(value).__name__}). Give tensors to an object of your own "
            "with state_dict and load_state_dict."
        )


STATES_BY_RANK = "_shares"
"""Entry of a metric's state with the states of each replica."""

_UPDATES = "_update_count"  # of a torchmetrics metric


def kind_of_state(obj: Any) -> str:
    """Return the kind of an object in a checkpoint: "module", "optimizer", "metric" or "other".

    >>> kind_of_state(torch.nn.Linear(1, 1)), kind_of_state(rd.Mean()), kind_of_state(rd.State())
    ('module', 'metric', 'other')
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(obj, torchmetrics.Metric):
        return "metric"
    if isinstance(obj, nn.Module):
        return "module"
    return "optimizer" if isinstance(obj, torch.optim.Optimizer) else "other"


def class_of_state(obj: Any) -> str | None:
    """Return the class name if a state fits its class only (optimizers, schedulers, rd.State); else None."""
    schedulers = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    return type(obj).__name__ if isinstance(obj, (torch.optim.Optimizer, State, *schedulers)) else None


def state_of(obj: Any, modules: Mapping[str, nn.Module]) -> Any:
    """Return the state of an object, for `pack_state`. Blocks for dispatched steps if the object is mirrored."""
    kind = kind_of_state(obj)
    if kind == "optimizer":
        return optimizer_entries(_optimizer_state(obj), parameter_names(obj, modules))
    if kind == "metric":
        entries = {name: getattr(obj, name) for name in _metric_entries(obj)}
        by_rank = states_by_rank(obj)
        return {**obj.state_dict(), **entries, **({STATES_BY_RANK: by_rank} if by_rank else {})}
    state = obj.state_dict(keep_vars=True) if kind == "module" and STAGES in vars(obj) else obj.state_dict()
    return plain_names(state) if kind == "module" and has_compiled(obj) else state


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the `state_dict`, with the states of all stages of a pipeline."""
    found = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_sharded, parameters)):
        return found
    states = states_of_all(parameters, optimizer.state)
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    return {**found, "state": {numbers[parameter]: state for parameter, state in states.items()}}


def load_state(obj: Any, state: Any, modules: Mapping[str, nn.Module], strict: bool = True) -> None:
    """Load a result of `state_of`; with `strict`, a module or optimizer must find all of its entries, and no others."""
    kind = kind_of_state(obj)
    if kind == "optimizer":
        names = parameter_names(obj, modules)
        if not strict:
            state = fitting_entries(state, optimizer_entries(obj.state_dict(), names))
        numbered = optimizer_state(state, names)
        obj.load_state_dict(numbered)
        for parameter in [each for each in obj.state if is_sharded(each)]:
            obj.state[parameter] = shard_state(obj.state[parameter], parameter)
        keep_types(obj, numbered)
    elif kind == "metric":
        _load_metric(obj, state)
    elif kind == "module":
        if has_compiled(obj):
            state = compiled_names(state, obj.state_dict())
        obj.load_state_dict(_shard_entries(state, obj), strict=strict)
        for metric in (part for part in obj.modules() if kind_of_state(part) == "metric"):
            metric._computed = None  # a cached result of torchmetrics, computed from the previous states
    else:
        obj.load_state_dict(state)


def _shard_entries(state: Any, module: nn.Module) -> Any:
    """Return the state of a module, with the entries of sharded parameters divided among the replicas."""
    if not any(map(is_sharded, module.parameters())):
        return state
    present = module.state_dict(keep_vars=True)
    return {key: shard_like(value, present[key]) if key in present else value for key, value in state.items()}


def sharded_tensors_of(obj: Any, modules: Mapping[str, nn.Module]) -> Mapping[str, torch.Tensor]:
    """Return the sharded tensors of a module by name, or the sharded parameters of an optimizer."""
    kind = kind_of_state(obj)
    named: Iterable[tuple[str, torch.Tensor]] = ()
    if kind == "module":
        named = ((plain_name(name), each) for name, each in obj.named_parameters(remove_duplicate=False))
    elif kind == "optimizer":
        parameters = (each for group in obj.param_groups for each in group["params"])
        named = zip(parameter_names(obj, modules), parameters, strict=True)
    return {name: each for name, each in named if is_sharded(each)}


def rejected_state(name: str, obj: Any, error: Exception) -> InvalidArgumentError:
    """Return the error for a saved state that `load_state_dict` of an object does not accept."""
    return InvalidArgumentError(
        f"The saved state of {name!r} must be one that a {type(obj).__name__} takes, but load_state_dict says: "
        f"{error!s:.500} ({type(error).__name__}). Restore into one like that which was saved."
    )


def _metric_entries(metric: Any) -> tuple[str, ...]:
    """Return the names of a metric's states, which torchmetrics leaves out of state_dict."""
    return (*metric._defaults, *((_UPDATES,) if hasattr(metric, _UPDATES) else ()))


def _load_metric(metric: Any, state: Mapping[str, Any]) -> None:
    own = _metric_entries(metric)
    others = {name: value for name, value in state.items() if name not in (*own, STATES_BY_RANK)}
    metric.load_state_dict(others, strict=False)
    for name in own:
        if name in state:
            value = state[name]
            setattr(metric, name, value.to(metric.device) if isinstance(value, torch.Tensor) else value)
    metric._computed = None
    if STATES_BY_RANK in state:
        setattr(metric, RESTORED_BY_RANK, list(state[STATES_BY_RANK]))


_MAX_DEPTH = 20


def has_state(obj: Any) -> bool:
    """Return True if `obj` has `state_dict` and `load_state_dict`."""
    if isinstance(obj, type):
        return False
    # The class first: reading an attribute of a mirrored object waits for dispatched steps.
    places = (type(obj), obj)
    methods = ("state_dict", "load_state_dict")
    return all(any(callable(getattr(place, method, None)) for place in places) for method in methods)


def named_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return all objects with a state, by their paths.

    Raises:
        InvalidArgumentError: A value is neither an object with a state nor a dict or list of such; named in the
            message.

    >>> import torch
    >>> found = named_objects({"model": torch.nn.Linear(1, 1), "more": {"a": [rd.State()]}})
    >>> list(found)
    ['model', 'more.a.0']
    """
    found: dict[str, Any] = {}
    for path, obj in _leaves(objects, ()):
        name = ".".join(path)
        if name in found:
            raise InvalidArgumentError(
                f"Two objects of a checkpoint must have two names, but two are called {name!r}. Rename a key that has "
                "a dot."
            )
        found[name] = obj
    return found


def _metrics_in(value: Any) -> Mapping[str, Any] | None:
    """Return the metrics of a torchmetrics collection, whose own state lacks the states of its metrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or not isinstance(value, torchmetrics.MetricCollection):
        return None
    return dict(value.items(keep_base=True, copy_state=False))


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    metrics = _metrics_in(value)
    if metrics is not None:
        value = metrics
    if path and has_state(value):
        yield path, value
    elif path and callable(getattr(type(value), "checkpoint_objects", None)):  # an rd.Model
        for key, part in value.checkpoint_objects(metrics=True).items():
            # The module gets the model's own name, which becomes the name of its file.
            yield from _leaves(part, path if key == "model" else (*path, key))
    else:
        for key, part in _parts(value, path):
            yield from _leaves(part, (*path, key))


def _parts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and len(path) < _MAX_DEPTH:
        parts = list(value.items())
    elif isinstance(value, list | tuple) and len(path) < _MAX_DEPTH:
        parts = list(enumerate(value))
    else:
        raise InvalidArgumentError(
            "What a checkpoint holds must have state_dict and load_state_dict, or be a dict or a list of such, but "
            f"{'.'.join(path)!r} is {value!r:.100} ({type(value).__name__}). Put numbers and text into an rd.State, "
            "and tensors into a module."
        )
    for key, part in parts:
        if not isinstance(key, str | int):
            raise InvalidArgumentError(
                f"Keys of dicts in a checkpoint must be text or numbers, got {key!r:.100} in {'.'.join(path)!r}. Use "
                "their names."
            )
        yield str(key), part


def aliases_of(named: Mapping[str, Any]) -> dict[str, str]:
    """Return each further name of an object that has several, with the first name of that object.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> aliases_of({"a": model, "b": model, "c": torch.nn.Linear(1, 1)})
    {'b': 'a'}
    """
    first: dict[int, str] = {}
    return {name: known for name, obj in named.items() if (known := first.setdefault(id(obj), name)) != name}


@final
class PendingGradients:
    """The `.grad` of a module's parameters.

    Attributes:
        module: The module.

    >>> model = torch.nn.Linear(1, 1)
    >>> model(torch.ones(1)).backward()
    >>> PendingGradients(model).state_dict()
    {'weight': tensor([[1.]]), 'bias': tensor([1.])}
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the existing gradients by parameter name."""
        named = self.module.named_parameters()
        return {plain_name(name): each.grad for name, each in named if each.grad is not None}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set these gradients and clear all others; raise InvalidArgumentError, unchanged, if one does not fit."""
        parameters = {plain_name(name): each for name, each in self.module.named_parameters()}
        for name, gradient in state.items():
            if name not in parameters or parameters[name].shape != gradient.shape:
                raise InvalidArgumentError(
                    f"A saved gradient must be of a parameter and of its shape, but {name!r} of shape "
                    f"{tuple(gradient.shape)} is not. Restore into a module like the one that was saved."
                )
        for name, parameter in parameters.items():
            found = state.get(name)
            parameter.grad = None if found is None else found.to(parameter.device, parameter.dtype)
