"""cloudpickle, with one registry of dynamic classes for the two copies of cloudpickle in a Ray process.

A class of the user's script is pickled by value. cloudpickle gives each such class an id, and recognises the class by
that id when it is unpickled. Ray bundles its own copy of cloudpickle, with its own ids. Without a shared registry, a
class that arrives by one copy and leaves by the other (a namedtuple that a step returns) would become a new class on
each replica and on the driver.

Ray object references are pickled by Ray's copy: only Ray's copy records the owner of the object, and without the owner
`ray.get` blocks for ever.
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import ray
from ray.cloudpickle import cloudpickle as rays_copy

__all__ = ["cloudpickle", "share_classes"]

_BY_CLASS, _BY_NUMBER, _LOCK = (f"_DYNAMIC_CLASS_TRACKER_{what}" for what in ("BY_CLASS", "BY_ID", "LOCK"))


def share_classes() -> None:
    """Make Ray's copy of cloudpickle use the registry of the other copy, after merging both. May be called again."""
    ours = cloudpickle.cloudpickle
    if not all(hasattr(copy, name) for copy in (ours, rays_copy) for name in (_BY_CLASS, _BY_NUMBER, _LOCK)):
        return  # another version of cloudpickle: each copy keeps its own registry
    for name in (_BY_CLASS, _BY_NUMBER):
        known = getattr(ours, name)
        for key, value in list(getattr(rays_copy, name).items()):
            known.setdefault(key, value)
    for name in (_BY_CLASS, _BY_NUMBER, _LOCK):
        setattr(rays_copy, name, getattr(ours, name))


def _reduce_reference(reference: ray.ObjectRef[Any]) -> tuple[Any, ...]:
    return pickle.loads, (rays_copy.dumps(reference),)


share_classes()
cloudpickle.Pickler.dispatch_table[ray.ObjectRef] = _reduce_reference
