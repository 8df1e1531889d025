"""A replica's end of a step channel: it runs what comes, and answers.

Between two messages all replicas of a crowd wait for the slowest. To read the headers of the next one takes as long as
all else that is done around a step: so a replica reads it while it waits for the others inside of a collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, final

from raydist.actors.step_head import DONE, HEAD, KEPT, MOST_BYTES, STEPS
from raydist.channels.hub import ChannelEnd
from raydist.collectives.shared_memory.spare_time import while_waiting

__all__ = ["MessageRunner", "StepServer"]


class MessageRunner(Protocol):
    """What runs the steps of messages."""

    def read_ahead(self, message: bytes, /) -> Any:
        """What a message says, or None where it is not to be read before its turn. Called while another one runs."""

    def run_message(self, message: bytes, said: Any, more_wait: Callable[[], bool], /) -> Any:
        """Do what a message says; raises nothing.

        Args:
            message: It.
            said: What `read_ahead` gave of it, where that was asked; else None.
            more_wait: Whether others wait behind it.

        Returns:
            A result whose `packed()` are its bytes, or None where it must travel another way.
        """


@final
class StepServer:
    """Serves one replica.

    Args:
        end: Where messages come.
        runner: Runs them.
        keep: Keeps a result that must travel another way until the driver asks for it.
        reads_ahead: Whether messages are read while the runner waits.
    """

    def __init__(
        self, end: ChannelEnd, runner: MessageRunner, keep: Callable[[int, Any], None], *, reads_ahead: bool
    ) -> None:
        self._end = end
        self._runner = runner
        self._keep = keep
        self._reads_ahead = reads_ahead
        self._said: Any = None  # by the message behind, once it has been read

    def serve(self, turn: int) -> None:
        """Do what comes, until the turn of this number is over or the driver is gone. Blocks."""
        with while_waiting(self._read_ahead) if self._reads_ahead else contextlib.nullcontext():
            while (message := self._end.take()) is not None:
                kind, number = HEAD.unpack_from(message)
                if kind == STEPS:
                    self._run(number, message)
                elif number == turn:
                    return  # else it is the end of a turn that never began

    def _run(self, number: int, message: bytes) -> None:
        said, self._said = self._said, None
        result = self._runner.run_message(message[HEAD.size :], said, self._more_wait)
        packed = result.packed()
        if packed is None or len(packed) > MOST_BYTES or not self._end.put(HEAD.pack(DONE, number) + packed):
            self._keep(number, result)
            self._end.put(HEAD.pack(KEPT, number))

    def _more_wait(self) -> bool:
        return self._steps_behind() is not None

    def _steps_behind(self) -> bytes | None:
        message = self._end.peek()
        return message[HEAD.size :] if message is not None and message[0] == STEPS else None

    def _read_ahead(self) -> None:
        if self._said is None and (message := self._steps_behind()) is not None:
            with contextlib.suppress(Exception):  # whatever is wrong with it, the runner finds when it is to run it
                self._said = self._runner.read_ahead(message)
