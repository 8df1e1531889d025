"""An operation of a group in shared memory: steps that its rank takes whenever the others have come far enough.

No thread works on it. It goes on while its rank is inside a call of the communicator: one that waits, or one that
starts something else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import final

from raydist.collectives.shared_memory.board import Board, Count
from raydist.errors import CollectiveMismatchError

__all__ = ["Condition", "Reached", "Steps", "Task"]


class Condition(ABC):
    """What an operation waits for.

    Attributes:
        last: Whether this rank has nothing more to do that others wait for, so that its next collective may go on.
    """

    last: bool

    @abstractmethod
    def met(self) -> bool:
        """Whether it may go on."""

    @abstractmethod
    def missing(self) -> tuple[int, ...]:
        """The ranks of the segment that it waits for."""

    def outside(self) -> tuple[int, ...]:
        """The ranks that it waits for and that are not in the segment, as the whole group counts them."""
        return ()

    def lost(self) -> tuple[int, ...]:
        """Those of them that are known to be gone."""
        return ()


@final
class Reached(Condition):
    """All ranks have counted so far.

    Args:
        board: Where they count.
        count: What.
        value: How far.
        last: See `Condition`.
    """

    # One is made for every step of an operation: a frozen dataclass takes a microsecond more.
    __slots__ = ("_board", "_count", "_value", "last")

    def __init__(self, board: Board, count: Count, value: int, *, last: bool = False) -> None:
        self._board = board
        self._count = count
        self._value = value
        self.last = last

    def met(self) -> bool:
        return self._board.all_reached(self._count, self._value)

    def missing(self) -> tuple[int, ...]:
        return self._board.missing(self._count, self._value)


Steps = Generator[Condition, None, None]
"""The steps of an operation; between them it says what it waits for."""


@final
class Task:
    """One operation under way.

    Attributes:
        operation: What it is called in messages.
        awaited: What it waits for; None before its first step.
        done: Whether it is over, well or badly.
        error: What it raised.
        noted: Whether a rank has marked it.
        left_at: How often the rank's bell had rung when it left the rest to another one, who will ring; None where it
            may have more to do.
        steps: Those that are left; None of one that is over. May be set once, where they need the task itself.
    """

    def __init__(self, operation: str, steps: Steps | None = None) -> None:
        self.operation = operation
        self.noted = False
        self.awaited: Condition | None = None
        self.done = False
        self.error: BaseException | None = None
        self.left_at: int | None = None
        self.steps = steps

    def advance(self) -> None:
        """Take all steps that can be taken now. Raises what must not happen; a mismatch is for whoever waits."""
        steps = self.steps
        if steps is None:
            return
        try:
            while self.awaited is None or self.awaited.met():
                self.awaited = next(steps)
        except StopIteration:
            self._end(None)
        except CollectiveMismatchError as error:
            self._end(error)
        except BaseException as error:
            self._end(error)
            raise

    def drop(self) -> None:
        """Let go of tensors: nobody will go on with it."""
        self.steps = None

    def _end(self, error: BaseException | None) -> None:
        self.done, self.error, self.steps, self.awaited = True, error, None, None
