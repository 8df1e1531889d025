"""A cache of pickled step arguments, keyed by their form: the same nest of batches and the same plain values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, final

from raydist.mirroring.discovery import Discovery
from raydist.values import PerReplica

__all__ = ["ArgumentForms", "argument_form"]

_KEPT = 64
_PLAIN = (bool, int, str, bytes, type(None))


@final
class ArgumentForms:
    """An LRU cache of pickled arguments, keyed by form."""

    def __init__(self) -> None:
        self._pickles: OrderedDict[Hashable, bytes] = OrderedDict()

    def pickled(self, discovery: Discovery, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Return the cached pickle of a step's arguments, or make one; `discovery` receives the PerReplica leaves."""
        form = None if discovery.per_replica else argument_form(args, kwargs)
        known = self.pickle_of(form[0]) if form else b""
        if form and known:
            discovery.per_replica.extend(form[1])
            return known
        pickled = discovery.pickle((tuple(args), dict(kwargs)), "the arguments of run")
        if form:
            self.remember(form[0], pickled)
        return pickled

    def pickle_of(self, form: Hashable) -> bytes:
        """Return the cached pickle of arguments of this form; empty if there is none."""
        if form not in self._pickles:
            return b""
        self._pickles.move_to_end(form)
        return self._pickles[form]

    def remember(self, form: Hashable, pickled: bytes) -> None:
        """Cache the pickle of arguments of this form."""
        self._pickles[form] = pickled
        if len(self._pickles) > _KEPT:
            self._pickles.popitem(last=False)


def argument_form(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Hashable, tuple[PerReplica, ...]] | None:
    """Return a key for the pickle of these arguments, and the PerReplica leaves in the order of their placeholders.

    Return None if the arguments cannot be compared cheaply: objects, tensors, one leaf in two places.
    """
    leaves: list[PerReplica] = []
    try:
        form = _form((tuple(args), dict(kwargs)), leaves)
    except TypeError:
        return None
    return (form, tuple(leaves)) if len({id(leaf) for leaf in leaves}) == len(leaves) else None


def _form(value: Any, leaves: list[PerReplica]) -> Hashable:
    kind = type(value)
    if kind is tuple:
        return (tuple, *(_form(item, leaves) for item in value))
    if kind is dict:
        return (dict, *((_form(key, leaves), _form(item, leaves)) for key, item in value.items()))
    if isinstance(value, PerReplica):
        leaves.append(value)
        return PerReplica
    if kind in _PLAIN:
        return kind, value
    raise TypeError(f"A {kind.__name__} has no form.")
