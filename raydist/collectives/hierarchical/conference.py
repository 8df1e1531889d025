"""How hosts agree, before anything large is sent, that all of their ranks call the same.

Leaders tell each other what their hosts call, together with what is small enough to go along, and announce to the ranks
of their hosts how it went.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Generator
from typing import Any, final

import torch

from raydist.collectives.hierarchical.frames import Frame, Head
from raydist.collectives.hierarchical.leaders import Heard, LeaderFrames
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.hierarchical.small_loads import SmallLoad
from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.calls import is_noted, is_same_call, shown_call
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.layout import CONTRIBUTION_BYTES
from raydist.collectives.shared_memory.task import Condition
from raydist.collectives.translation import mismatch_error
from raydist.collectives.wires.wires import Wires
from raydist.errors import CollectiveMismatchError

__all__ = ["Conference"]

_AGREED, _NOTED, _REFUSED = b"agreed", b"agreed, noted", b"refused"
_LEADER = 0


@final
class _Announced(Condition):
    """The leader has said how a call went."""

    __slots__ = ("_board", "_number", "last")

    def __init__(self, board: Board, number: int) -> None:
        self._board = board
        self._number = number
        self.last = False

    def met(self) -> bool:
        return self._board.count_of(_LEADER, Count.ANNOUNCED) > self._number

    def missing(self) -> tuple[int, ...]:
        """The leader, and for whom it waits."""
        return () if self.met() else (_LEADER, *self._board.missing(Count.ENTERED, self._number + 1))


@final
class Conference:
    """One rank's part in it.

    Args:
        plan: Who speaks for whom.
        generation: Of this rank's host.
        wires: To the other hosts.
    """

    def __init__(self, plan: HostPlan, generation: SharedGeneration, wires: Wires) -> None:
        self._plan = plan
        self._generation = generation
        self._board = generation.board
        self._frames = LeaderFrames(plan, wires) if plan.leads else None
        self._noted: set[int] = set()

    def confer(self, number: int, load: SmallLoad | None = None) -> Generator[Condition, None, None]:
        """Agree on call `number`, and announce the result where something is brought.

        Args:
            number: Of the call; that all ranks of this host have begun it, the leader has seen to.
            load: What is brought.

        Raises:
            CollectiveMismatchError: On every rank of every host.
        """
        if self._frames is not None:
            yield from self._lead(number, load, self._frames)
            return
        if self._board.count_of(_LEADER, Count.ANNOUNCED) <= number:
            yield _Announced(self._board, number)
        verdict = self._board.verdict_of(number)
        if verdict == _REFUSED:
            said = self._generation.segment.address + self._slot(number)
            text = ctypes.string_at(said, CONTRIBUTION_BYTES).split(b"\0")[0]
            raise CollectiveMismatchError(f"{text.decode(errors='replace')}")
        if verdict == _NOTED:
            self._noted.add(number)

    def announced(self, number: int, load: SmallLoad) -> torch.Tensor:
        """The result of call `number`, for which the leader has made place."""
        place = self._slot(number) if load.place is None else load.place
        return self._generation.view(place, load.numel, load.dtype)

    def take_note(self, number: int) -> bool:
        """Whether any rank has marked this call; to be asked once."""
        if not self._noted:
            return False
        noted = number in self._noted
        self._noted.discard(number)
        return noted

    # --- the leader ---------------------------------------------------------------------------------------------------

    def _lead(self, number: int, load: SmallLoad | None, frames: LeaderFrames) -> Generator[Condition, None, None]:
        head, frame = self._said(number, load, frames)
        frames.tell(head, frame)
        heard = yield from frames.hear()
        others = [other for other, _ in heard.values()]
        if not head.agreed or not all(other.agreed and is_same_call(other.text, head.text) for other in others):
            raise self._refuse(number, heard)
        if load is not None:
            bodies = {host: other.body(load.dtype) for host, (_, other) in heard.items()}
            bodies[self._plan.host] = frame.body(load.dtype)
            load.conclude([bodies[host] for host in range(len(bodies))], self.announced(number, load))
        noted = head.noted or any(other.noted for other in others)
        if noted:
            self._noted.add(number)
        self._announce(number, _NOTED if noted else _AGREED)

    def _said(self, number: int, load: SmallLoad | None, frames: LeaderFrames) -> tuple[Head, Frame]:
        """What the leader says of its host's ranks, and what follows that."""
        board = self._board
        call = board.call_of(_LEADER, number)
        # One comparison of all: one by one, those of 16 ranks take a hundred calls with cold caches.
        calls = [call] if board.all_call(number, call, board.memory_of(_LEADER, number)) else board.calls_of(number)
        noted = any(map(is_noted, calls))
        if all(is_same_call(call, other) for other in calls[1:]):
            frame = frames.next(0 if load is None else load.num_bytes)
            if load is not None:
                load.bring(frame.body(load.dtype))
            return Head(True, frame.num_bytes, call.rstrip(), noted), frame
        body = json.dumps([shown_call(other) for other in calls]).encode()
        frame = frames.next(len(body))
        frame.body(torch.uint8).copy_(_as_bytes(body))
        return Head(False, frame.num_bytes, call.rstrip(), noted), frame

    def _refuse(self, number: int, heard: Heard) -> CollectiveMismatchError:
        """Have the ranks of this host raise; the error is for the leader."""
        error = self._mismatch(number, heard)
        text = error.message.encode()[: CONTRIBUTION_BYTES - 1] + b"\0"
        ctypes.memmove(self._generation.segment.address + self._slot(number), text, len(text))
        self._announce(number, _REFUSED)
        return error

    def _mismatch(self, number: int, heard: Heard) -> CollectiveMismatchError:
        said = dict(zip(self._plan.members, map(shown_call, self._board.calls_of(number)), strict=True))
        for host, (head, frame) in heard.items():
            members = self._plan.hosts[host]
            texts: list[Any] = [shown_call(head.text)] * len(members)
            if not head.agreed:
                texts = json.loads(bytes(frame.body(torch.uint8).numpy()))
            said |= dict(zip(members, texts, strict=True))
        return mismatch_error([f"{said[rank]} as call {number}" for rank in sorted(said)])

    def _announce(self, number: int, verdict: bytes) -> None:
        self._board.write_verdict(number, verdict)
        self._board.announce(number + 1)

    def _slot(self, number: int) -> int:
        return self._board.layout.slot(_LEADER, number)


def _as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
