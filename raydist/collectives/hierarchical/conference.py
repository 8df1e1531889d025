"""How hosts agree, before anything large is sent, that all of their ranks call the same.

Leaders tell each other what their hosts call, together with what is small enough to go along, and announce to the ranks
of their hosts how it went.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, final

import torch

from raydist.collectives.hierarchical.frames import FRAME_HEAD_BYTES, Head
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.calls import is_noted, is_same_call, shown_call
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.layout import CONTRIBUTION_BYTES
from raydist.collectives.shared_memory.task import Condition
from raydist.collectives.translation import mismatch_error
from raydist.collectives.wires.channel import Passage
from raydist.collectives.wires.landed import Landed
from raydist.collectives.wires.wires import Wires
from raydist.errors import CollectiveMismatchError

__all__ = ["Conference", "Parts"]

_AGREED, _NOTED, _REFUSED = b"agreed", b"agreed, noted", b"refused"
_LEADER = 0

Parts = list[torch.Tensor]
"""What each host has brought, in the order of hosts."""


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
        self._leads = plan.leads
        self._generation = generation
        self._board = generation.board
        self._wires = wires
        self._sent: list[Passage] = []
        self._noted: set[int] = set()

    def confer(
        self,
        number: int,
        bring: Callable[[], torch.Tensor] | None = None,
        conclude: Callable[[Parts], torch.Tensor] | None = None,
        *,
        place: int | None = None,
    ) -> Generator[Condition, None, None]:
        """Agree on call `number`, and announce the result where something is brought.

        Args:
            number: Of the call; that all ranks of this host have begun it, the leader has seen to.
            bring: Makes what this host brings: flat, of at most as much as fits its place. Called on the leader.
            conclude: Makes one of all hosts' parts. Called on the leader.
            place: Where in the segment the leader leaves the result; in its slot, unless given.

        Raises:
            CollectiveMismatchError: On every rank of every host.
        """
        if self._leads:
            yield from self._lead(number, bring, conclude, self._slot(number) if place is None else place)
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

    def announced(self, number: int, like: torch.Tensor, place: int | None = None) -> torch.Tensor:
        """What the leader has announced as the result of call `number`."""
        return self._generation.view(self._slot(number) if place is None else place, like.numel(), like.dtype)

    def take_note(self, number: int) -> bool:
        """Whether any rank has marked this call; to be asked once."""
        if not self._noted:
            return False
        noted = number in self._noted
        self._noted.discard(number)
        return noted

    # --- the leader ---------------------------------------------------------------------------------------------------

    def _lead(
        self,
        number: int,
        bring: Callable[[], torch.Tensor] | None,
        conclude: Callable[[Parts], torch.Tensor] | None,
        at: int,
    ) -> Generator[Condition, None, None]:
        board, plan = self._board, self._plan
        calls = [board.call_of(place, number) for place in range(len(plan.members))]
        head, mine = _said(calls)
        if head.agreed and bring is not None:
            mine = bring()
            head = replace(head, num_bytes=mine.nbytes)
        self._tell(head, mine)
        heads, bodies = yield from self._hear()
        if not head.agreed or any(
            not other.agreed or not is_same_call(other.text, head.text) for other in heads.values()
        ):
            error = self._mismatch(number, calls, heads, bodies)
            text = _as_bytes(error.message.encode()[: CONTRIBUTION_BYTES - 1] + b"\0")
            self._announce(number, _REFUSED, text, self._slot(number))
            raise error
        result = None
        if conclude is not None:
            parts = [mine if host == plan.host else bodies[host].view(mine.dtype) for host in range(len(plan.hosts))]
            result = conclude(parts)
        noted = head.noted or any(other.noted for other in heads.values())
        if noted:
            self._noted.add(number)
        self._announce(number, _NOTED if noted else _AGREED, result, at)

    def _tell(self, head: Head, body: torch.Tensor) -> None:
        frame = torch.empty(FRAME_HEAD_BYTES + body.nbytes, dtype=torch.uint8)
        encoded = head.encode()
        ctypes.memmove(frame.data_ptr(), encoded, FRAME_HEAD_BYTES)
        ctypes.memmove(frame.data_ptr() + FRAME_HEAD_BYTES, body.data_ptr(), body.nbytes)
        self._sent = [transfer for transfer in self._sent if not transfer.done]
        self._sent += [self._wires.send(leader, frame) for leader in self._others()]

    def _hear(self) -> Generator[Condition, None, tuple[dict[int, Head], dict[int, torch.Tensor]]]:
        raw = {
            self._plan.host_of(leader): torch.empty(FRAME_HEAD_BYTES, dtype=torch.uint8) for leader in self._others()
        }
        leaders = {host: self._plan.hosts[host][0] for host in raw}
        yield Landed([self._wires.receive(leaders[host], data) for host, data in raw.items()])
        heads = {host: Head.decode(data) for host, data in raw.items()}
        bodies = {host: torch.empty(head.num_bytes, dtype=torch.uint8) for host, head in heads.items()}
        yield Landed([self._wires.receive(leaders[host], body) for host, body in bodies.items()])
        return heads, bodies

    def _others(self) -> list[int]:
        return [members[0] for members in self._plan.hosts if members != self._plan.members]

    def _mismatch(
        self, number: int, calls: list[bytes], heads: dict[int, Head], bodies: dict[int, torch.Tensor]
    ) -> CollectiveMismatchError:
        said = dict(zip(self._plan.members, map(shown_call, calls), strict=True))
        for host, head in heads.items():
            members = self._plan.hosts[host]
            texts: list[Any] = [shown_call(head.text)] * len(members)
            if not head.agreed:
                texts = json.loads(bytes(bodies[host].numpy()))
            said |= dict(zip(members, texts, strict=True))
        return mismatch_error([f"{said[rank]} as call {number}" for rank in sorted(said)])

    def _announce(self, number: int, verdict: bytes, what: torch.Tensor | None, at: int) -> None:
        if what is not None:
            ctypes.memmove(self._generation.segment.address + at, what.data_ptr(), what.nbytes)
        self._board.write_verdict(number, verdict)
        self._board.announce(number + 1)

    def _slot(self, number: int) -> int:
        return self._board.layout.slot(_LEADER, number)


def _said(calls: list[bytes]) -> tuple[Head, torch.Tensor]:
    """What the leader of ranks with these calls says of them, and what follows that where they are not the same."""
    noted = any(map(is_noted, calls))
    if calls.count(calls[0]) == len(calls) or all(is_same_call(calls[0], call) for call in calls):
        return Head(True, 0, calls[0].rstrip(), noted), torch.empty(0)
    body = _as_bytes(json.dumps([shown_call(call) for call in calls]).encode())
    return Head(False, body.nbytes, calls[0].rstrip(), noted), body


def _as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
