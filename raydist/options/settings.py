"""Groups of validated settings that remember which of them were set: the base of :class:`raydist.Options`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

from raydist.core.errors import InvalidArgumentError

_T = TypeVar("_T")
_G = TypeVar("_G", bound="SettingsGroup")


class SettingsGroup:
    """Named settings with defaults. An unknown name is an AttributeError, a wrong type a TypeError.

    :meth:`merge` considers only the settings that were set explicitly.

    Args:
        settings: Values of the group's settings, by name.
    """

    __slots__ = ("_frozen", "_values")

    _values: dict[str, Any]
    _frozen: bool

    def __init__(self, **settings: Any) -> None:
        self._values = {}
        self._frozen = False
        for name, value in settings.items():
            if not isinstance(getattr(type(self), name, None), Setting):
                known = ", ".join(self.names())
                raise AttributeError(f"{type(self).__name__} has no setting {name!r}. It has {known}.")
            setattr(self, name, value)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the settings in this group.

        >>> rd.AutotuneOptions.names()
        ['enabled', 'cpu_budget', 'ram_budget']
        """
        return [name for name, setting in vars(cls).items() if isinstance(setting, Setting)]

    def merge(self, later: Self) -> Self:
        """Return these settings, overridden by those that were set explicitly in `later`.

        Args:
            later: A group of the same class. Neither group is changed.

        >>> rd.Options(seed=1, deterministic=False).merge(rd.Options(seed=2))
        Options(seed=2, deterministic=False)
        """
        merged = type(self)()
        for source in (self, later):
            for name, value in source._values.items():
                mine = merged._values.get(name)
                merged._values[name] = mine.merge(value) if isinstance(mine, SettingsGroup) else _copy(value)
        return merged

    def frozen(self) -> Self:
        """Return a copy that cannot be changed: setting an attribute of it is an InvalidArgumentError.

        >>> rd.Options(seed=1).frozen().seed
        1
        """
        copy = type(self)().merge(self)
        copy._freeze()
        return copy

    def _freeze(self) -> None:
        for name in self.names():
            if isinstance(value := getattr(self, name), SettingsGroup):
                value._freeze()
        self._frozen = True

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.names())

    __hash__ = None  # type: ignore[assignment]  # settings can change

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._values.items() if not _is_untouched(value))
        return f"{type(self).__name__}({given})"


def _copy(value: Any) -> Any:
    return type(value)().merge(value) if isinstance(value, SettingsGroup) else value


def _is_untouched(value: Any) -> bool:
    return isinstance(value, SettingsGroup) and all(map(_is_untouched, value._values.values()))


class Setting(Generic[_T]):
    """One setting of a group, a descriptor.

    Args:
        make_default: Returns the default value.
        accepts: Returns True if a value has the right type and range.
        expected: Description of the accepted values, for the message.
    """

    def __init__(self, make_default: Callable[[], _T], accepts: Callable[[object], bool], expected: str) -> None:
        self._make_default = make_default
        self._accepts = accepts
        self._expected = expected
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: SettingsGroup, owner: type) -> _T: ...
    def __get__(self, instance: SettingsGroup | None, owner: type) -> Self | _T:
        if instance is None:
            return self
        if self._name in instance._values:
            value: _T = instance._values[self._name]
            return value
        default = self._make_default()
        if isinstance(default, SettingsGroup) and not instance._frozen:
            instance._values[self._name] = default  # so that settings inside it are kept
        elif isinstance(default, SettingsGroup):
            default._freeze()
        return default

    def __set__(self, instance: SettingsGroup, value: _T) -> None:
        owner = type(instance).__name__
        if instance._frozen:
            raise InvalidArgumentError(
                f"The options of a dataset cannot be changed, got {self._name} = {value!r}. "
                "Make an rd.Options() and use dataset.with_options(options)."
            )
        if not self._accepts(value):
            raise TypeError(f"{owner}.{self._name} must be {self._expected}, got {value!r}.")
        instance._values[self._name] = value


def typed(default: _T, kind: type[_T]) -> Setting[_T]:
    """Return a setting of exactly one type."""
    return Setting(lambda: default, lambda value: type(value) is kind, f"a {kind.__name__}")


def one_of(default: _T, *choices: _T) -> Setting[_T]:
    """Return a setting with a few possible values."""
    return Setting(lambda: default, lambda value: value in choices, f"one of {', '.join(map(repr, choices))}")


def count(default: int, minimum: int) -> Setting[int]:
    """Return a setting for whole numbers from `minimum` on."""
    return Setting(lambda: default, lambda value: _is_count(value, minimum), f"an int >= {minimum}")


def optional_count(default: int | None, minimum: int) -> Setting[int | None]:
    """Return a setting for whole numbers from `minimum` on, or None."""

    def accepts(value: object) -> bool:
        return value is None or _is_count(value, minimum)

    return Setting(lambda: default, accepts, f"None or an int >= {minimum}")


def _is_count(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def group(kind: type[_G]) -> Setting[_G]:
    """Return a setting that is a group itself."""
    return Setting(kind, lambda value: type(value) is kind, f"a {kind.__name__}")
