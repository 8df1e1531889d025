"""Mirrored modules, optimizers, schedulers, ... on the driver: the user's own objects with another class.

An object becomes mirrored in place: its class changes to a subclass that calls the owner before every access to an
attribute. The subclass has the original's name, `isinstance` and `obj.__class__` see the original, the subclass equals
the original (`type(module) == nn.Linear`), and copies, pickles and `type(module)(4, 2)` use the original. Only
`type(module) is nn.Linear` is False.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, final

from raydist.checkpoints.object_state import OWNER
from raydist.core.exception_utils import fold
from raydist.mirroring.gradients import zero_grad_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class AttributeOwner(Protocol):
    """The interface that keeps the attributes of mirrored objects up to date."""

    def before_read(self, obj: Any, name: str) -> None:
        """Prepare for the program reading `obj.name` (or calling a method of that name)."""

    def before_write(self, obj: Any, name: str) -> None:
        """Prepare for the program setting or deleting `obj.name`."""


@final
class MirroredClasses:
    """Make the objects of one owner mirrored, and plain again."""

    def __init__(self, owner: AttributeOwner) -> None:
        self._owner = owner
        self._classes: dict[type, type] = {}  # by original

    def original(self, obj: Any) -> type:
        """Return the class of `obj` before it was mirrored."""
        return _original(type(obj)) if self._is_mine(obj) else type(obj)

    def _is_mine(self, obj: Any) -> bool:
        return vars(type(obj)).get(OWNER) is self._owner and is_mirrored_class(type(obj))

    def mirror(self, obj: Any) -> None:
        """Make `obj` mirrored. An object whose class cannot change (a torch.Generator) stays plain."""
        cls = type(obj)
        if self._is_mine(obj) or not cls.__flags__ & _HEAP_TYPE:
            return
        if cls not in self._classes:
            self._classes[cls] = self._subclass(cls)
        _set_class(obj, self._classes[cls])

    def plain(self, obj: Any) -> None:
        """Undo :meth:`mirror`; does nothing for an object that is not mirrored by this owner."""
        if self._is_mine(obj):
            _set_class(obj, self.original(obj))

    @contextmanager
    def as_plain(self, obj: Any) -> Iterator[None]:
        """Give `obj` its original class inside the block."""
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
                    # A step failed with an AttributeError: Python now calls `__getattr__`, which raises it again.
                    _failed.error = error
                raise
            value = read(obj, name)
            if name == "load_state_dict":
                return _without_warning(value)
            return zero_grad_of(obj, value) if name == "zero_grad" else value

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
            if name == "__class__":  # parametrizations change the class
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


def _without_warning(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `load_state_dict` without torch's warning that it has no effect on parameters on the device "meta"."""

    @functools.wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            return load(*args, **kwargs)

    return loading


class _Failed(threading.local):
    """The AttributeError of a step that a read of an attribute in this thread has just raised."""

    error: AttributeError | None = None


_failed = _Failed()

_ORIGINAL = "_raydist_original"

_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: set on classes made by a class statement, whose instances may change class."""


def _method(cls: type, name: str) -> Any:
    """Return a special method as a function; for `cls.__setattr__`, mypy would assume the metaclass's."""
    return getattr(cls, name)


def is_mirrored_class(cls: type) -> bool:
    """Return True if objects of `cls` are mirrored, by any owner."""
    return _ORIGINAL in vars(cls)


def _original(cls: type) -> type:
    """Return the original class if `cls` is a class of mirrored objects; else `cls`."""
    found: type = vars(cls).get(_ORIGINAL, cls)
    return found


@functools.cache
def _lookalikes(kind: type) -> type:
    """Return a metaclass for classes of mirrored objects, derived from the original's metaclass `kind`.

    A class of mirrored objects equals the original class in `==`, sets and dicts, and a call of it makes objects of the
    original class. A class that the program derives from it behaves like an ordinary class.
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
    """Disable the program's `__init_subclass__` inside the block, so that a mirrored subclass is not reported to it."""
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
