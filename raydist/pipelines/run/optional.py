"""An element that may be absent."""

from __future__ import annotations

from typing import Generic, Self, TypeVar, final

from raydist.core.errors import InvalidArgumentError

_T = TypeVar("_T")


@final
class Optional(Generic[_T]):
    """An element, or the absence of one (tf.experimental.Optional).

    Args:
        values: The element in a tuple; an empty tuple for none. Use `from_value` or `empty`.

    >>> iterator = iter(rd.Dataset.range(1))
    >>> iterator.get_next_as_optional(), iterator.get_next_as_optional()
    (Optional(tensor(0)), Optional.empty())
    """

    __slots__ = ("_values",)

    def __init__(self, values: tuple[_T, ...]) -> None:
        self._values = values

    @classmethod
    def from_value(cls, value: _T) -> Self:
        """Return an optional with a value.

        Args:
            value: Any value, including None.

        >>> rd.Optional.from_value(3).get_value()
        3
        """
        return cls((value,))

    @classmethod
    def empty(cls) -> Self:
        """Return an optional without a value.

        >>> rd.Optional.empty().has_value()
        False
        """
        return cls(())

    def has_value(self) -> bool:
        """Return True if there is a value.

        >>> rd.Optional.from_value(None).has_value()
        True
        """
        return bool(self._values)

    def get_value(self) -> _T:
        """Return the value.

        Raises:
            InvalidArgumentError: There is no value.

        >>> rd.Optional.from_value("a").get_value()
        'a'
        """
        if not self._values:
            raise InvalidArgumentError("This Optional has no value: the dataset had ended. Ask has_value() first.")
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional({self._values[0]!r})" if self._values else "Optional.empty()"
