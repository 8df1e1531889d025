"""Control state (the state of training objects apart from tensors) as a flat table of paths.

The control state of an object is its `__dict__` (training flag, param_groups, a scheduler's counters, plain attributes,
the names of submodules). Walking the dicts and lists in it gives one :class:`Attribute` per *path*, so that driver and
replicas can compare, name, send and patch attributes one by one. Containers are patched in place: a dict that the
program holds (`group = optimizer.param_groups[0]`) stays in use.

>>> model = {"training": True, "groups": [{"lr": 0.1}]}
>>> before = capture(model)
>>> model["groups"][0]["lr"] = 0.5
>>> changes = changed(before, capture(model))
>>> {attribute_name(path): value for path, value in changes.items()}
{"groups[0]['lr']": 0.5}
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

AttributePath = tuple[Hashable, ...]
Digest = Callable[[Any], Hashable]
IdentitySnapshot = Callable[[Any], bool]

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, enum.Enum)
CONTAINERS = (dict, OrderedDict, list)


@final
@dataclass(frozen=True, slots=True)
class Keys:
    """The type and the ordered keys (indices for a list) of a container."""

    kind: type
    names: tuple[Hashable, ...]


@final
@dataclass(frozen=True, slots=True)
class Attribute:
    """A value and a mark of its content at the time of capture (None if `value` is immutable)."""

    value: Any
    mark: Hashable = None

    def same(self, other: Attribute) -> bool:
        if self.mark is not None or other.mark is not None:
            return self.mark == other.mark
        if self.value is other.value:
            return True
        return type(self.value) is type(other.value) and bool(self.value == other.value)

    def sealed(self) -> Attribute:
        """Return the attribute without its value if it has a mark, so that a record keeps no objects alive."""
        return self if self.mark is None else Attribute(None, self.mark)


AttributeTable = dict[AttributePath, Attribute]
_EMPTY = {kind: Attribute(Keys(kind, ())) for kind in CONTAINERS}


@final
class Identity:
    """A mark that is equal for one and the same object, held by weak reference if possible.

    A plain id would not do: Python reuses the ids of dead objects.
    """

    __slots__ = ("_ref",)

    def __init__(self, value: Any) -> None:
        try:
            self._ref: Any = weakref.ref(value)
        except TypeError:
            self._ref = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._ref is other._ref

    def __hash__(self) -> int:
        return id(self._ref)


def seal(flat: AttributeTable) -> AttributeTable:
    """Return a copy of `flat` for later comparison, without references to mutable objects."""
    return {path: attribute.sealed() for path, attribute in flat.items()}


def is_plain(value: Any) -> bool:
    """Return True if `value` is immutable and compares by content."""
    if type(value) in (tuple, frozenset):
        return all(is_plain(item) for item in value)
    return isinstance(value, (*_IMMUTABLE, Keys))


def capture(root: dict[Any, Any], *, skip: Collection[str] = (), digest: Digest = Identity) -> AttributeTable:
    """Return every attribute in `root`, a `__dict__`, by path.

    Args:
        root: The dictionary to walk, with the dicts and lists in it; every other value is an attribute.
        skip: Keys of `root` that are not control state.
        digest: Returns the mark of a mutable value (an array, an object of a user's class).
    """
    flat: AttributeTable = {}
    top = {key: value for key, value in root.items() if key not in skip} if skip else root
    _walk((), top, flat, digest, {id(root)})
    return flat


def _walk(prefix: AttributePath, container: Any, flat: AttributeTable, digest: Digest, above: set[int]) -> None:
    names = tuple(container) if isinstance(container, dict) else tuple(range(len(container)))
    flat[(*prefix, Keys)] = Attribute(Keys(type(container), names))
    for name, value in list(_items(container)):
        path = (*prefix, name)
        if type(value) in CONTAINERS and not value:
            flat[(*path, Keys)] = _EMPTY[type(value)]
        elif type(value) in CONTAINERS and id(value) not in above:
            _walk(path, value, flat, digest, above | {id(value)})
        elif is_plain(value):
            flat[path] = Attribute(value)
        else:
            flat[path] = Attribute(value, digest(value))


def _items(container: Any) -> Iterator[tuple[Hashable, Any]]:
    return iter(container.items()) if isinstance(container, dict) else iter(enumerate(container))


def changed(before: AttributeTable, now: AttributeTable) -> dict[AttributePath, Any]:
    """Return the values of `now` that differ from `before`; a removal shows as new `Keys` of the container."""
    found: dict[AttributePath, Any] = {}
    for path, attribute in now.items():
        old = before.get(path)
        if old is None or not old.same(attribute):
            found[path] = attribute.value
    return found


def patch(root: dict[str, Any], changes: Mapping[AttributePath, Any], *, skip: Collection[str] = ()) -> None:
    """Apply the changes of the other side to `root`, in place; `skip` as in :func:`capture`."""
    by_depth = sorted(changes.items(), key=lambda item: len(item[0]))
    shapes = [(path[:-1], value) for path, value in by_depth if path[-1] is Keys]
    for prefix, keys in shapes:
        _make_container(root, prefix, keys)
    for path, value in by_depth:
        if path[-1] is not Keys:
            _put(_resolve(root, path[:-1]), path[-1], value)
    for prefix, keys in shapes:
        _trim(_resolve(root, prefix), keys, kept=skip if not prefix else ())


def _resolve(root: Any, path: AttributePath) -> Any:
    for name in path:
        root = root[name]
    return root


def _make_container(root: dict[str, Any], prefix: AttributePath, keys: Keys) -> None:
    if not prefix:
        return
    parent, name = _resolve(root, prefix[:-1]), prefix[-1]
    has = name in parent if isinstance(parent, dict) else isinstance(name, int) and name < len(parent)
    held = parent[name] if has else None
    if type(held) is not keys.kind:
        # A dict that became an OrderedDict keeps its items: the unchanged ones are not sent.
        _put(parent, name, keys.kind(held) if isinstance(held, dict) and issubclass(keys.kind, dict) else keys.kind())


def _put(container: Any, name: Any, value: Any) -> None:
    if isinstance(container, list):
        container.extend([None] * (name + 1 - len(container)))
    container[name] = value


def _trim(container: Any, keys: Keys, *, kept: Collection[str]) -> None:
    """Remove the items that the other side no longer has, and take over the order of its keys."""
    if isinstance(container, list):
        del container[len(keys.names) :]
        return
    rest = {name: container[name] for name in container if name in kept}
    ordered = {name: container[name] for name in keys.names if name in container}
    container.clear()
    container.update(ordered)
    container.update(rest)


def attributes(obj: Any) -> dict[str, Any]:
    """Return the real `__dict__`, without running the class's attribute access."""
    found: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    return found


def attribute_name(path: AttributePath) -> str:
    """Return a path in Python syntax.

    >>> attribute_name(("param_groups", 0, "lr"))
    "param_groups[0]['lr']"
    """
    names = [name for name in path if name is not Keys]
    return str(names[0]) + "".join(f"[{name!r}]" for name in names[1:]) if names else "its attributes"


def snapshot_of(value: Any, digest: Digest, above: frozenset[int] = frozenset()) -> IdentitySnapshot | None:
    """Return a function that tells whether its argument is the same value with the same items; None if it cannot.

    Comparing tables costs 60 us for an optimizer, and in almost every step nothing has changed; the function compares
    identities, which takes a few microseconds. There is none for values that are mutable in place. If the function
    returns False, the caller must compare tables.
    """
    if type(value) in CONTAINERS:
        if id(value) in above:  # a container that holds itself
            return None
        names, items = (range(len(value)), value) if type(value) is list else (tuple(value), value.values())
        found = [snapshot_of(item, digest, above | {id(value)}) for item in items]
        checks = [check for check in found if check is not None]
        return functools.partial(_has_same, type(value), names, checks) if len(checks) == len(found) else None
    if is_plain(value):
        return lambda now: now is value
    mark = digest(value)
    if type(mark) is not Identity and not (type(mark) is tuple and mark[0] == "handle"):
        return None
    try:
        seen = weakref.ref(value)
    except TypeError:  # a value without weak references, as a weak reference itself
        return None
    return lambda now: now is not None and now is seen()  # a dead weak reference gives None


def _has_same(kind: Any, names: Sequence[Hashable], checks: Sequence[IdentitySnapshot], container: Any) -> bool:
    """Return True if a container of this type has items with these names (indices of a list) that pass the checks."""
    if type(container) is not kind or len(container) != len(names):
        return False
    return all(
        check(item) and name == known
        for check, known, (name, item) in zip(checks, names, _items(container), strict=True)
    )
