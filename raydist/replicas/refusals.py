"""Why a replica runs no more steps in this generation of its group, and which saves it refused for that."""

from __future__ import annotations

from collections import OrderedDict
from typing import final

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.errors import CancelledError

__all__ = ["Refusals"]

_KEPT = 8


@final
class Refusals:
    """After a step has failed, those behind it are refused until the next generation.

    Args:
        rank: The replica, for messages.

    Attributes:
        failed_step: The step that failed; None as long as none has.

    >>> refusals = Refusals(1)
    >>> refusals.failed(3, ValueError("bad row"))
    >>> refusals.error(4)
    CancelledError('Step 4 was given up on replica 1, because step 3 failed.')
    """

    def __init__(self, rank: int) -> None:
        self.failed_step: int | None = None
        self._rank = rank
        self._failure: BaseException | None = None
        self._noted: OrderedDict[int, PortableError] = OrderedDict()

    def restart(self) -> None:
        """A generation begins: nothing has failed in it."""
        self.failed_step = self._failure = None

    def failed(self, step: int, error: BaseException) -> None:
        """A step has failed."""
        self.failed_step, self._failure = step, error

    def error(self, step: int) -> CancelledError:
        """What a step is refused with."""
        return CancelledError(
            f"Step {step} was given up on replica {self._rank}, because step {self.failed_step} failed."
        )

    def note(self, step: int) -> None:
        """Keep for a while why a step was refused: somebody will ask beside the steps."""
        cause = self._failure or CancelledError(f"Step {step} was given up: another replica failed.")
        self._noted[step] = pack_error(cause)
        while len(self._noted) > _KEPT:
            self._noted.popitem(last=False)

    def of(self, step: int) -> PortableError | None:
        """Why a step was refused; None where it was not, as far as is known."""
        return self._noted.get(step)
