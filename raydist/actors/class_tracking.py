"""cloudpickle, with one memory of classes for both of its copies in a process of Ray's.

A class of the program's own script travels by value. cloudpickle gives each a number, by which it is known when it
comes back; Ray has a copy of cloudpickle of its own, with numbers of its own. What came by one and left by the other (a
namedtuple that a step returns) would be a class of its own on each replica, and on the driver.

References to objects of Ray go by Ray's copy: only that one tells the reader who owns the object, without which
`ray.get` waits for ever.
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
    """Have Ray's copy go on with the numbers of the other, which gets those that Ray's knows. May be called again."""
    ours = cloudpickle.cloudpickle
    if not all(hasattr(copy, name) for copy in (ours, rays_copy) for name in (_BY_CLASS, _BY_NUMBER, _LOCK)):
        return  # another version of cloudpickle: each goes by its own
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
