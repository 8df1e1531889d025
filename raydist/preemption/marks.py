"""Positions at step boundaries, so that batches drawn for steps that did not begin can be drawn again."""

from __future__ import annotations

from collections import deque
from typing import Any, final

__all__ = ["PlaceMarks"]

_MOST = 256  # larger than the number of functions that may wait for workers


@final
class PlaceMarks:
    """The latest distinct positions, each with the first boundary at which it was recorded.

    >>> marks = PlaceMarks()
    >>> for boundary, place in ((3, "a"), (4, "b"), (5, "b")):
    ...     marks.note(boundary, place)
    >>> marks.before(3), marks.before(4), marks.before(9), marks.last_change
    (None, 'a', 'b', 4)
    """

    def __init__(self) -> None:
        self._places: deque[tuple[int, Any]] = deque(maxlen=_MOST)
        self.num_forgotten = 0
        """Number of positions that were dropped."""

    def note(self, boundary: int, place: Any) -> None:
        """Record the position at a boundary; None if unknown."""
        if not self._places or place is None or self._places[-1][1] != place:
            self.num_forgotten += len(self._places) == _MOST
            self._places.append((boundary, place))

    def before(self, boundary: int) -> Any:
        """Return the position when the last step before this boundary began; None if unknown."""
        return next((place for number, place in reversed(self._places) if number < boundary), None)

    @property
    def first(self) -> int | None:
        """The boundary of the first known position; None if there is none."""
        return self._places[0][0] if self._places else None

    @property
    def last_change(self) -> int:
        """The first boundary with the current position; -1 if there is none."""
        return self._places[-1][0] if self._places else -1
