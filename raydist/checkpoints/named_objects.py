"""The objects of a checkpoint by name, including objects in dicts and lists; each object is stored once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from raydist.errors import InvalidArgumentError

__all__ = ["has_state", "named_objects", "other_names"]

_MOST_LEVELS = 20


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
    if isinstance(value, Mapping) and len(path) < _MOST_LEVELS:
        parts = list(value.items())
    elif isinstance(value, list | tuple) and len(path) < _MOST_LEVELS:
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


def other_names(named: Mapping[str, Any]) -> dict[str, str]:
    """Return each further name of an object that has several, with the first name of that object.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> other_names({"a": model, "b": model, "c": torch.nn.Linear(1, 1)})
    {'b': 'a'}
    """
    first: dict[int, str] = {}
    return {name: known for name, obj in named.items() if (known := first.setdefault(id(obj), name)) != name}
