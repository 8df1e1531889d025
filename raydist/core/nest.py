"""Nested structures: tuples, namedtuples, dicts and dataclasses of leaves.

An element of a dataset, a distributed batch and the result of a step are all *nests*: a :class:`Structure` (the shape
of the nest) and its leaves in a fixed order. A Python list is a leaf (it becomes one tensor), as in tf.data.

Results of steps keep their classes: a `ModelOutput`, or an object of another class derived from dict or tuple, or of a
dataclass, is rebuilt with its attributes. In the elements of datasets every mapping becomes a dict.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from raydist.core.errors import SpecError
from raydist.core.weak_class_cache import remembered_by_class


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """Data to rebuild an object with attributes beside its items, without its constructor.

    Attributes:
        kind: Class of the object.
        num_attributes: Number of attributes: the last keys of the structure; the other keys are items.
        linked: Names of attributes that hold the item of the same name.
        absent: Names of attributes that are None.
    """

    kind: type
    num_attributes: int = 0
    linked: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nest, without its leaves: hashable, picklable, comparable.

    Leaves are in the order of sorted dict keys, so that {a, b} equals {b, a} and their leaves correspond. The original
    order of a dict's keys is not compared.

    Attributes:
        kind: None for a leaf, else the type to build: `tuple`, `dict`, a namedtuple or a dataclass.
        keys: Field names or dict keys in leaf order; indices for a plain tuple.
        children: One structure per key.
        shown: For a dict, the indices of its keys in their original order; empty if the keys are sorted.
        form: For an object that is rebuilt as its own class; None for all others.
    """

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    shown: tuple[int, ...] = dataclasses.field(default=(), compare=False, metadata={"fingerprint": False})
    form: Form | None = dataclasses.field(default=None, compare=False, metadata={"fingerprint": False})

    def __setstate__(self, state: Sequence[Any]) -> None:
        names = ("kind", "keys", "children", "shown", "form")
        defaults = (None, (), (), (), None)  # earlier versions pickled neither `shown` nor `form`
        for name, value in zip(names, (*state, *defaults[len(state) :]), strict=True):
            object.__setattr__(self, name, value)

    @property
    def num_leaves(self) -> int:
        """Number of leaves: 1 for a leaf itself."""
        return 1 if self.kind is None else sum(child.num_leaves for child in self.children)

    def paths(self, prefix: str = "") -> list[str]:
        """Return the names of the leaves, for messages and columns: `['image', 'label']`, `['0', '1.x']`, `['']`.

        Args:
            prefix: Prepended to every name, with a dot.

        >>> flatten({"x": 1, "y": (2, 3)})[1].paths()
        ['x', 'y.0', 'y.1']
        """
        if self.kind is None:
            return [prefix]
        dot = f"{prefix}." if prefix else ""
        return [p for key, child in zip(self.keys, self.children, strict=True) for p in child.paths(f"{dot}{key}")]

    def places(self) -> list[int]:
        """Return the indices of the leaves in the original order of the dicts' keys.

        >>> flatten({"y": (2, 3), "x": 1})[1].places()
        [1, 2, 0]
        """
        return self._places(0)

    def _places(self, start: int) -> list[int]:
        if self.kind is None:
            return [start]
        parts = []
        for child in self.children:
            parts.append(child._places(start))
            start += len(parts[-1])
        return [place for number in self.shown or range(len(parts)) for place in parts[number]]

    @property
    def is_sorted(self) -> bool:
        """True if every dict has its keys in sorted order."""
        return not self.shown and all(child.is_sorted for child in self.children)

    def by_key(self) -> Structure:
        """Return the same structure with the keys of every dict in sorted order.

        >>> unflatten(flatten({"y": 2, "x": 1})[1].by_key(), [3, 4])
        {'x': 3, 'y': 4}
        """
        if self.is_sorted:
            return self
        return Structure(self.kind, self.keys, tuple(child.by_key() for child in self.children), form=self.form)

    def __str__(self) -> str:
        """Show the nest with a star for each leaf. Builds no nest: a class of the program may reject stars.

        >>> str(flatten({"y": (2, [3]), "x": None})[1])
        "{'x': '*', 'y': ('*', '*')}"
        """
        return "*" if self.kind is None else self._text()

    def _text(self) -> str:
        if self.kind is None or self.kind is type(None):
            return "'*'" if self.kind is None else "None"
        parts = [child._text() for child in self.children]
        if self.form is not None:
            held = ", ".join(f"{key}={part}" for key, part in zip(self.keys, parts, strict=True))
            return f"{self.form.kind.__qualname__}({held})"
        if self.kind is tuple:
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if self.kind is dict:
            return f"{{{', '.join(f'{key!r}: {part}' for key, part in zip(self.keys, parts, strict=True))}}}"
        name = self.kind.__qualname__ if dataclasses.is_dataclass(self.kind) else self.kind.__name__
        return f"{name}({', '.join(f'{key}={part}' for key, part in zip(self.keys, parts, strict=True))})"


LEAF = Structure()
NOTHING = Structure(type(None))
"""The structure of None, where None is not a leaf."""

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
_SHORT = tuple(Structure(tuple, tuple(range(count)), (LEAF,) * count) for count in range(8))


def is_nested(value: Any) -> bool:
    """Return True if `value` has parts (a tuple, dict, namedtuple or dataclass instance).

    >>> is_nested((1, 2)), is_nested([1, 2])
    (True, False)
    """
    cls: Any = type(value)
    return _has_parts(cls)


@remembered_by_class
def _has_parts(kind: Any) -> bool:
    # Called for every leaf of every batch: abstract classes and `is_dataclass` take a microsecond.
    return issubclass(kind, tuple | Mapping) or dataclasses.is_dataclass(kind)


_Parts = tuple[type, tuple[Any, ...], Sequence[Any], tuple[int, ...], Form | None]


def _parts(value: Any, classes: bool) -> _Parts:
    """Return (kind, keys, values, shown, form) of a nested value. Dict keys are sorted: {a, b} equals {b, a}."""
    cls: Any = type(value)
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is not None:
            return cls, tuple(fields), value, (), None
        keys = tuple(range(len(value)))
        return _with_attributes(value, tuple, keys, list(value)) if classes else (tuple, keys, value, (), None)
    if cls is dict or (isinstance(value, Mapping) and not (classes and _is_rebuilt(cls))):
        return _dict_parts(value)
    if isinstance(value, Mapping):
        if not isinstance(value, dict):  # a wrapper around items, like UserDict: everything is in attributes
            return _with_attributes(value, cls, (), [])
        _, keys, values, shown, _ = _dict_parts(value)
        return _with_attributes(value, dict, keys, values, shown)
    names = tuple(field.name for field in dataclasses.fields(value))
    values = [getattr(value, name) for name in names]
    return _with_attributes(value, cls, names, values) if classes else (cls, names, values, (), None)


def _dict_parts(value: Mapping[Any, Any]) -> _Parts:
    given = tuple(value)
    keys = _sorted_keys(given)
    shown = () if keys == given else tuple(map({key: place for place, key in enumerate(keys)}.__getitem__, given))
    return dict, keys, [value[key] for key in keys], shown, None


@remembered_by_class
def _is_rebuilt(cls: Any) -> bool:
    """Return True for a mapping class whose objects can be built from their items and attributes."""
    if issubclass(cls, dict):
        return not issubclass(cls, defaultdict)  # the factory is no visible part of it
    return bool(cls.__flags__ & _HEAP_TYPE and cls.__dictoffset__)


def _with_attributes(
    value: Any, kind: type, keys: tuple[Any, ...], values: Sequence[Any], shown: tuple[int, ...] = ()
) -> _Parts:
    """Return the parts of an object with attributes beside its items; for a dataclass, all parts are attributes."""
    items = dict(zip(keys, values, strict=True))
    held = _attributes(value)
    linked = tuple(name for name, attribute in held.items() if name in items and items[name] is attribute)
    own = {name: attribute for name, attribute in held.items() if name not in linked}
    absent = tuple(name for name, attribute in own.items() if attribute is None)
    more = tuple(name for name in own if name not in absent)
    form = Form(type(value), len(more), linked, absent)
    shown = (*shown, *range(len(keys), len(keys) + len(more))) if shown else ()
    return kind, (*keys, *more), [*values, *(own[name] for name in more)], shown, form


def _attributes(value: Any) -> dict[str, Any]:
    try:
        held: dict[str, Any] = object.__getattribute__(value, "__dict__")  # bypasses overrides of attribute access
    except AttributeError:
        return {}
    return held


def _sorted_keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return tuple(sorted(keys))
    except TypeError:  # keys of several types
        return tuple(sorted(keys, key=lambda key: (type(key).__qualname__, repr(key))))


def flatten(value: Any, none: Structure = LEAF, *, classes: bool = True) -> tuple[list[Any], Structure]:
    """Return the leaves of a nest in order, and its structure.

    Args:
        value: Any value. Everything except a tuple, dict, namedtuple or dataclass is a leaf, lists included. The leaves
            of a dict are in sorted key order; the structure remembers the original order.
        none: The structure of None: a leaf, or NOTHING for a part without leaves.
        classes: True keeps the classes of objects; False makes every mapping a dict.

    >>> flatten({"x": 1, "y": (2, 3)})[0]
    [1, 2, 3]
    """
    leaves: list[Any] = []
    structure = _flatten_into(value, leaves, none, classes)
    return leaves, structure


def _flatten_into(value: Any, leaves: list[Any], none: Structure, classes: bool) -> Structure:
    if value is None and none is not LEAF:
        return none
    cls: Any = type(value)
    if cls is tuple:
        return _plain_tuple(tuple([_flatten_into(item, leaves, none, classes) for item in value]))
    if not _has_parts(cls) or getattr(value, "__nest_leaf__", False):
        leaves.append(value)
        return LEAF
    kind, keys, values, shown, form = _parts(value, classes)
    children = tuple([_flatten_into(item, leaves, none, classes) for item in values])
    return Structure(kind, keys, children, shown, form)


def _plain_tuple(children: tuple[Structure, ...]) -> Structure:
    # Most batches are short tuples of tensors: building their structure took as long as all the rest of `flatten`.
    if len(children) < len(_SHORT) and children == _SHORT[len(children)].children:
        return _SHORT[len(children)]
    return Structure(tuple, tuple(range(len(children))), children)


def leaves_in(value: Any) -> list[Any]:
    """Return the leaves of :func:`flatten` without the structure, in less than half the time.

    >>> leaves_in({"y": (2, None), "x": 1})
    [1, 2, None]
    """
    leaves: list[Any] = []
    _add_leaves(value, leaves)
    return leaves


def _add_leaves(value: Any, leaves: list[Any]) -> None:
    cls: Any = type(value)
    if cls is tuple:
        items: Sequence[Any] = value
    elif not _has_parts(cls) or getattr(value, "__nest_leaf__", False):
        leaves.append(value)
        return
    else:
        items = _parts(value, True)[2]
    for item in items:
        _add_leaves(item, leaves)


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Build the nest of `structure` with these leaves: the inverse of :func:`flatten`.

    Args:
        structure: A structure from `flatten`.
        leaves: As many leaves as the structure has.

    Raises:
        SpecError: There are more leaves.

    >>> leaves, structure = flatten(({"x": 1}, 2))
    >>> unflatten(structure, leaves)
    ({'x': 1}, 2)
    """
    value, used = _build(structure, leaves, 0)
    if used != len(leaves):
        raise SpecError(f"A structure with {used} leaves was given {len(leaves)} leaves.")
    return value


def _build(structure: Structure, leaves: Sequence[Any], at: int) -> tuple[Any, int]:
    if structure.kind is None:
        return leaves[at], at + 1
    values = []
    for child in structure.children:
        value, at = _build(child, leaves, at)
        values.append(value)
    if structure.form is not None:
        return _rebuild(structure, structure.form, values), at
    if structure.kind is tuple:
        return tuple(values), at
    if structure.shown:
        return {structure.keys[place]: values[place] for place in structure.shown}, at
    if structure.kind is dict:
        return dict(zip(structure.keys, values, strict=True)), at
    return _make(structure.kind, dict(zip(structure.keys, values, strict=True))), at


def _rebuild(structure: Structure, form: Form, values: list[Any]) -> Any:
    num_items = len(values) - form.num_attributes
    kind, items = form.kind, list(zip(structure.keys[:num_items], values[:num_items], strict=True))
    attributes = dict(zip(structure.keys[num_items:], values[num_items:], strict=True))
    if structure.kind is tuple:
        made = _new_tuple(kind, values[:num_items])
    elif structure.kind is dict:
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        made = base.__new__(kind)
        for place in structure.shown[:num_items] or range(num_items):
            base.__setitem__(made, *items[place])
    else:
        made = object.__new__(kind)
        for name, value in items:
            object.__setattr__(made, name, value)
    held = _attributes(made)
    held.update({name: value for name, value in items if name in form.linked})
    held.update({**attributes, **dict.fromkeys(form.absent)})
    return made


def _new_tuple(kind: Any, values: list[Any]) -> Any:
    """Build an object of a class derived from tuple; a plain tuple if the class rejects the values (torch.Size)."""
    for make in (functools.partial(tuple.__new__, kind), kind):
        try:
            return make(values)
        except TypeError:  # only C code can build some classes (torch.return_types)
            continue
    return tuple(values)


def _make(kind: Any, values: dict[str, Any]) -> Any:
    """Build a namedtuple or dataclass; fields that its constructor does not take are set afterwards."""
    late = [each.name for each in getattr(kind, "__dataclass_fields__", {}).values() if not each.init]
    made = kind(**{name: value for name, value in values.items() if name not in late})
    for name in late:
        object.__setattr__(made, name, values[name])
    return made


def map_structure(fn: Callable[..., Any], *nests: Any, none: Structure = LEAF, classes: bool = True) -> Any:
    """Apply `fn` to the corresponding leaves of nests of one structure; dict keys keep the order of the first nest.

    Args:
        fn: Called with one leaf of each nest.
        nests: One nest or more.
        none: The structure of None, see :func:`flatten`.
        classes: See :func:`flatten`.

    Raises:
        SpecError: The structures differ.

    >>> map_structure(lambda a, b: a + b, (1, {"x": 2}), (10, {"x": 20}))
    (11, {'x': 22})
    """
    if len(nests) == 1 and nests[0] is not None and not is_nested(nests[0]):
        return fn(nests[0])  # most often one tensor: flatten and unflatten would cost more than `fn`
    leaves, structure = flatten(nests[0], none, classes=classes)
    columns = [leaves]
    for other in nests[1:]:
        more, found = flatten(other, none, classes=classes)
        if found != structure:
            raise SpecError(f"All nests must have one structure: {structure} and {found} differ.")
        columns.append(more)
    return unflatten(structure, [fn(*row) for row in zip(*columns, strict=True)])
