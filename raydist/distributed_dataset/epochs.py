"""The epochs that a distributed dataset has begun, and the position of the last one, for resuming."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, final

from raydist.cluster.preemption import Positions
from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.seeds import draw_seed

_VERSION = 1


class EpochIterator(Protocol):
    """The part of an iterator over an epoch that `Epochs` uses."""

    @property
    def has_ended(self) -> bool:
        """True once the iterator has reached its end or was closed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the iterator's position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a position."""

    def stats(self) -> Any:
        """Return statistics of the iterator's pipeline."""

    def _place(self) -> Any:
        """Return the position without blocking; None if unknown. Its `state`, if any, outlives the iterator."""

    def _state_at(self, place: Any) -> dict[str, Any]:
        """Return the state of a position."""


@final
class Epochs:
    """The epochs of one dataset: the number of epochs begun, their seed, and the position of the last one.

    Inside :meth:`before_draw`, batches drawn for a step that did not begin count as not drawn.

    Args:
        given_seed: The program's seed; None to draw a seed when it is first needed.
    """

    def __init__(self, given_seed: int | None) -> None:
        self._seed = given_seed
        self._begun = 0
        self._began_at: tuple[int, dict[str, Any] | None] = 0, None  # state that was restored when the last epoch began
        self._resumed: EpochIterator | None = None  # continues where another process stopped
        self._last: weakref.ref[EpochIterator] | None = None
        self._positions = Positions()  # of the last iterator
        self._boundary = 0  # the last boundary
        self._first_boundary = 1  # of the last iterator
        self._undone: int | None = None

    @property
    def seed(self) -> int:
        """The seed of all epochs, so that an order without reshuffling stays the same."""
        if self._seed is None:
            self._seed = draw_seed()
        return self._seed

    def begin(self, open_epoch: Callable[[int], Any]) -> Any:
        """Return the iterator of the next epoch: the rest of the restored epoch, or a new epoch."""
        iterator, self._resumed = self._resumed, None
        if iterator is None:
            self._began_at = self._begun, None
            iterator = open_epoch(self._begun)
            self._begun += 1
        else:
            self._began_at = self._begun, iterator.state_dict()
        self._last = weakref.ref(iterator)
        self._forget_marks()
        return iterator

    def _forget_marks(self) -> None:
        self._positions = Positions()
        self._first_boundary = self._boundary + 1

    def stats(self) -> Any:
        """Return statistics of the last iterator's pipeline; None if the iterator is gone."""
        iterator = None if self._last is None else self._last()
        return None if iterator is None else iterator.stats()

    def _current(self) -> EpochIterator | None:
        iterator = None if self._last is None else self._last()
        return None if iterator is None or iterator.has_ended else iterator

    def mark(self, boundary: int | None = None) -> None:
        """Record the position at this boundary (None: the next one): a step begins, with all batches drawn so far."""
        self._boundary = self._boundary + 1 if boundary is None else boundary
        iterator = None if self._last is None else self._last()
        self._positions.note(self._boundary, None if iterator is None else iterator._place())

    @property
    def first_undoable(self) -> int:
        """The first boundary to which `before_draw` can go back."""
        return (self._positions.first or 0) + 1 if self._positions.num_forgotten else self._first_boundary

    @contextlib.contextmanager
    def before_draw(self, undone: int | None = None) -> Iterator[None]:
        """Make `state` return the position of the last :meth:`mark` (before this boundary) in the `with` block."""
        self._undone = self._boundary + 1 if undone is None else undone
        try:
            yield
        finally:
            self._undone = None

    @property
    def has_rest(self) -> bool:
        """True if the next :meth:`begin` returns the rest of a restored epoch."""
        return self._resumed is not None

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state for `restore`."""
        begun, position = self._position()
        return {"version": _VERSION, "seed": self.seed, "epochs": begun, "position": position}

    def is_read_by(self, iterator: Any) -> bool:
        """Return True for the iterator of the last epoch."""
        return self._last is not None and self._last() is iterator

    def state_with(self, position: dict[str, Any] | None) -> dict[str, Any]:
        """Return the state with this position of the last iterator; None for one that has ended."""
        return {"version": _VERSION, "seed": self.seed, "epochs": self._begun, "position": position}

    def _position(self) -> tuple[int, dict[str, Any] | None]:
        if self._resumed is not None:
            return self._begun, self._resumed.state_dict()
        iterator = self._current()
        if self._undone is not None and (iterator is not None or self._is_undone(self._undone)):
            return self._position_before(self._undone)
        return self._begun, None if iterator is None else iterator.state_dict()

    def _is_undone(self, boundary: int) -> bool:
        """Return True if undoing this boundary undoes a step with batches of the last iterator."""
        return boundary <= self._positions.last_change

    def _position_before(self, boundary: int) -> tuple[int, dict[str, Any] | None]:
        place = self._positions.before(boundary)
        iterator = None if self._last is None else self._last()
        if place is None and iterator is not None and is_lent(iterator):
            return self._begun, iterator.state_dict()
        if place is None:
            return self._began_at
        return self._begun, getattr(place, "state", None) if iterator is None else iterator._state_at(place)

    def restore(self, state: Mapping[str, Any], open_epoch: Callable[[int], Any]) -> None:
        """Restore the state of another dataset; the next :meth:`begin` continues its epoch.

        Raises:
            InvalidArgumentError: The state is invalid, or of another dataset. Nothing has changed.
        """
        seed, begun, position = _require_state(state)
        before = self._seed
        self._seed = seed
        try:
            resumed = None if position is None else open_epoch(max(0, begun - 1))
            if resumed is not None:
                resumed.load_state_dict(position)
        except BaseException:
            self._seed = before
            raise
        self._resumed, self._begun, self._last = resumed, begun, None
        self._forget_marks()


def is_lent(iterator: EpochIterator) -> bool:
    """Return True if replicas draw from the iterator themselves: all batches that they drew were used."""
    return getattr(iterator._place(), "num_loans", 0) > 0


def _require_state(state: Any) -> tuple[int, int, dict[str, Any] | None]:
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        version = state.get("version") if isinstance(state, Mapping) else state
        raise InvalidArgumentError(
            f"The state of a distributed dataset must be one of its state_dict(), version {_VERSION}, got "
            f"{version!r:.80}. Restore what a DistributedDataset saved under this name."
        )
    seed, begun, position = state.get("seed"), state.get("epochs"), state.get("position")
    counts = all(type(number) is int and 0 <= number < 2**64 for number in (seed, begun))
    if not counts or not isinstance(position, dict | None) or (position is not None and begun == 0):
        raise InvalidArgumentError(
            "The state of a distributed dataset must hold a seed, a number of epochs and the state of an iterator, got "
            f"seed {seed!r:.40}, epochs {begun!r:.40}, position {type(position).__name__}. It was changed since it was "
            "saved: restore another checkpoint."
        )
    return int(seed or 0), int(begun or 0), position
