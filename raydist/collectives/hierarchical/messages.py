"""Messages between ranks of different hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final

import torch

from raydist.collectives.hierarchical.frames import FRAME_HEAD_BYTES, Head
from raydist.collectives.shared_memory.task import Condition, Steps, Task
from raydist.collectives.wires.landed import Landed
from raydist.collectives.wires.wires import Topic, Wires
from raydist.errors import CollectiveMismatchError

__all__ = ["RemoteMessages"]

_TEXT_BYTES = 200


@final
class RemoteMessages:
    """One rank's messages under way. Those of a pair arrive in the order in which they are sent.

    Args:
        rank: This rank.
        wires: To the others.

    Attributes:
        num_under_way: How many there are.
    """

    def __init__(self, rank: int, wires: Wires) -> None:
        self._rank = rank
        self._wires = wires
        self._queues: dict[tuple[str, int], deque[Task]] = {}
        self.num_under_way = 0

    def send(self, operation: str, data: torch.Tensor, call: str, destination: int) -> Task:
        """Start to send bytes; `call` says what they are."""
        return self._start(("to", destination), Task(operation, self._send(data, call, destination)))

    def recv(self, operation: str, data: torch.Tensor, call: str, source: int, deliver: Callable[[], None]) -> Task:
        """Start to receive bytes that should be what `call` says, and to call `deliver` when they are there."""
        return self._start(("from", source), Task(operation, self._recv(data, call, source, deliver)))

    def advance(self) -> None:
        """Do all that can be done now."""
        for queue in self._queues.values():
            while queue:
                queue[0].advance()
                if not queue[0].done:
                    break
                queue.popleft()
                self.num_under_way -= 1

    def conditions(self, task: Task) -> list[Condition]:
        """What a message waits for, or the one before it; nothing where it is not one of these."""
        for queue in self._queues.values():
            if task in queue and queue[0].awaited is not None:
                return [queue[0].awaited]
        return []

    def drop(self) -> None:
        """Let go of all tensors."""
        for queue in self._queues.values():
            for task in queue:
                task.drop()
            queue.clear()
        self.num_under_way = 0

    def _start(self, key: tuple[str, int], task: Task) -> Task:
        self._queues.setdefault(key, deque()).append(task)
        self.num_under_way += 1
        self.advance()
        return task

    def _send(self, data: torch.Tensor, call: str, destination: int) -> Steps:
        head = Head(True, data.nbytes, call.encode()[:_TEXT_BYTES]).encode()
        yield Landed([self._wires.send(destination, part, Topic.MESSAGE) for part in (head, data)])

    def _recv(self, data: torch.Tensor, call: str, source: int, deliver: Callable[[], None]) -> Steps:
        raw = torch.empty(FRAME_HEAD_BYTES, dtype=torch.uint8)
        yield Landed([self._wires.receive(source, raw, Topic.MESSAGE)])
        head = Head.decode(raw)
        if head.num_bytes == data.nbytes and head.text == call.encode()[:_TEXT_BYTES]:
            yield Landed([self._wires.receive(source, data, Topic.MESSAGE)])
            deliver()
            return
        # What does not fit is taken off the wire, so that the next message is not mistaken for it.
        yield Landed([self._wires.receive(source, torch.empty(head.num_bytes, dtype=torch.uint8), Topic.MESSAGE)])
        raise CollectiveMismatchError(
            f"A message must have one shape and dtype on both ends, got {call} on rank {self._rank} for "
            f"{head.text.decode(errors='replace')} from rank {source}."
        )
