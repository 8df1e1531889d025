"""Mirrored modules, optimizers, schedulers, ... on the driver: the user's objects, told apart by their class alone.

An object becomes mirrored in place, by a change of its class to a subclass that announces every access to an attribute
before it happens. The subclass carries the original's name, `isinstance` and `obj.__class__` see the original, it
equals the original (`type(module) == nn.Linear`), and copies, pickles and `type(module)(4, 2)` are made as if the
object had never been mirrored. Only `type(module) is nn.Linear` tells.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, final

from raydist.checkpoints.metric_shares import OWNER
from raydist.foreign_errors import fold

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AttributeOwner", "MirroredClasses", "is_mirrored_class"]


class AttributeOwner(Protocol):
    """Who keeps the attributes of mirrored objects fresh."""

    def before_read(self, obj: Any, name: str) -> None:
        """`obj.name` is about to be read (or a method of that name called)."""

    def before_write(self, obj: Any, name: str) -> None:
        """`obj.name` is about to be set or deleted."""

    def zero_grad_of(self, obj: Any, method: Any) -> Any:
        """What `obj.zero_grad` is to the program, where it is `method`."""


@final
class MirroredClasses:
    """Makes objects of one owner mirrored, and plain again."""

    def __init__(self, owner: AttributeOwner) -> None:
        self._owner = owner
        self._classes: dict[type, type] = {}  # by original

    def original(self, obj: Any) -> type:
        """The class of `obj` as its author wrote it."""
        return _original(type(obj)) if self._is_mine(obj) else type(obj)

    def _is_mine(self, obj: Any) -> bool:
        return vars(type(obj)).get(OWNER) is self._owner and is_mirrored_class(type(obj))

    def mirror(self, obj: Any) -> None:
        """Make `obj` mirrored. Objects whose class cannot change (a torch.Generator) stay as they are."""
        cls = type(obj)
        if self._is_mine(obj) or not cls.__flags__ & _HEAP_TYPE:
            return
        if cls not in self._classes:
            self._classes[cls] = self._subclass(cls)
        _set_class(obj, self._classes[cls])

    def plain(self, obj: Any) -> None:
        """Undo :meth:`mirror`. An object that it left as it was stays so."""
        if self._is_mine(obj):
            _set_class(obj, self.original(obj))

    @contextmanager
    def as_plain(self, obj: Any) -> Iterator[None]:
        """Undo :meth:`mirror` for a moment: what runs inside sees the original class."""
        mirrored = type(obj)
        _set_class(obj, self.original(obj))
        try:
            yield
        finally:
            _set_class(obj, mirrored)

    def _subclass(self, original: type) -> type:
        namespace = {
            "__slots__": (),
            _ORIGINAL: original,
            OWNER: self._owner,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__getattribute__": self._getattribute(original),
            "__getattr__": self._getattr(original),
            "__setattr__": self._setattr(original),
            "__delattr__": self._delattr(original),
            "__reduce_ex__": self._reduce_ex(),
        }
        with _unannounced(original):
            made: type = _lookalikes(type(original))(original.__name__, (original,), namespace)
            return made

    def _getattribute(self, original: type) -> Callable[[Any, str], Any]:
        owner = self._owner
        read: Callable[[Any, str], Any] = _method(original, "__getattribute__")

        def __getattribute__(obj: Any, name: str) -> Any:
            if name == "__class__":
                return original
            try:
                owner.before_read(obj, name)
            except Exception as error:
                fold(error)
                if isinstance(error, AttributeError):
                    # A step failed with it. Python now asks `__getattr__`, which raises it again.
                    _failed.error = error
                raise
            value = read(obj, name)
            return owner.zero_grad_of(obj, value) if name == "zero_grad" else value

        return __getattribute__

    def _getattr(self, original: type) -> Callable[[Any, str], Any]:
        # The original's own `__getattr__` answers; without one, the second read raises as the first did.
        missing: Callable[[Any, str], Any] = getattr(original, "__getattr__", _method(original, "__getattribute__"))

        def __getattr__(obj: Any, name: str) -> Any:
            error, _failed.error = _failed.error, None
            if error is not None:
                try:
                    raise error
                except AttributeError:
                    fold(error)  # this frame again
                    raise
            return missing(obj, name)

        return __getattr__

    def _setattr(self, original: type) -> Callable[[Any, str, Any], None]:
        owner = self._owner
        write: Callable[[Any, str, Any], None] = _method(original, "__setattr__")

        def __setattr__(obj: Any, name: str, value: Any) -> None:
            if name == "__class__":  # parametrizations exchange it
                _set_class(obj, value)
                self.mirror(obj)
                return
            owner.before_write(obj, name)
            write(obj, name, value)

        return __setattr__

    def _delattr(self, original: type) -> Callable[[Any, str], None]:
        owner = self._owner
        delete: Callable[[Any, str], None] = _method(original, "__delattr__")

        def __delattr__(obj: Any, name: str) -> None:
            owner.before_write(obj, name)
            delete(obj, name)

        return __delattr__

    def _reduce_ex(self) -> Callable[[Any, Any], Any]:
        def __reduce_ex__(obj: Any, protocol: Any) -> Any:
            self._owner.before_read(obj, "__dict__")
            with self.as_plain(obj):
                return obj.__reduce_ex__(protocol)

        return __reduce_ex__


class _Failed(threading.local):
    """The AttributeError of a step that a read of an attribute in this thread has just raised."""

    error: AttributeError | None = None


_failed = _Failed()

_ORIGINAL = "_raydist_original"

_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: set on classes made by a class statement, whose instances may change class."""


def _method(cls: type, name: str) -> Any:
    """A special method as a function of the object; mypy takes `cls.__setattr__` for the metaclass's."""
    return getattr(cls, name)


def is_mirrored_class(cls: type) -> bool:
    """Whether objects of `cls` are mirrored, by whichever owner."""
    return _ORIGINAL in vars(cls)


def _original(cls: type) -> type:
    """What the author wrote where `cls` is a class of mirrored objects; else `cls`."""
    found: type = vars(cls).get(_ORIGINAL, cls)
    return found


@functools.cache
def _lookalikes(kind: type) -> type:
    """A metaclass for classes of mirrored objects, below the metaclass `kind` of what they are mirrored from.

    To `==`, sets and dicts each is the class that its objects had, and called it makes objects of that one. A class
    that a program derives from it is one of the program's own.
    """

    def __eq__(cls: type, other: object) -> bool:
        return isinstance(other, type) and _original(cls) is _original(other)

    def __hash__(cls: type) -> int:
        return hash(_original(cls)) if is_mirrored_class(cls) else _method(kind, "__hash__")(cls)

    def __call__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if is_mirrored_class(cls):
            return _original(cls)(*args, **kwargs)
        return _method(kind, "__call__")(cls, *args, **kwargs)

    def __instancecheck__(cls: type, instance: Any) -> bool:
        if is_mirrored_class(cls):
            return isinstance(instance, _original(cls))
        return bool(_method(kind, "__instancecheck__")(cls, instance))

    methods = (__eq__, __hash__, __call__, __instancecheck__)
    return type(kind)(kind.__name__, (kind,), {method.__name__: method for method in methods})


def _set_class(obj: Any, cls: type) -> None:
    object.__setattr__(obj, "__class__", cls)


@contextmanager
def _unannounced(original: type) -> Iterator[None]:
    """Make a subclass that the program's `__init_subclass__` does not see: to it there is none."""
    hook = "__init_subclass__"
    if not hasattr(getattr(original, hook), "__func__"):  # the one of `object`
        yield
        return
    own = vars(original).get(hook)
    type.__setattr__(original, hook, classmethod(lambda cls: None))
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(original, hook)
        else:
            type.__setattr__(original, hook, own)
