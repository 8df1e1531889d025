"""Objects that hold a value and are not the value: arithmetic on them raises an error that says how to read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn

from raydist.errors import InvalidArgumentError

__all__ = ["NoNumber"]


class NoNumber(ABC):
    """A class without arithmetic, comparisons and truth value; equality is identity, as for other objects."""

    @staticmethod
    @abstractmethod
    def _refusal() -> str:
        """Return the message of the error: the object is not a number, and what to do."""

    def _refuse(self, *_: object) -> NoReturn:
        raise InvalidArgumentError(self._refusal())

    __bool__ = __int__ = __float__ = __complex__ = __round__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __pos__ = __abs__ = _refuse
