"""The driver's hub of replicas that are on other hosts: relays there pass messages on (see `step_relay`)."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import final

from raydist.actors.step_relay import Relayed
from raydist.channels.sleeper import LOOK_S

__all__ = ["RelayedHub"]

Message = tuple[int, bytes]


@final
class RelayedHub:
    """Has the calls of a :class:`ChannelHub`, of which `put` only gathers: `flush` sends.

    Args:
        hosts: The ranks on each host, in the order of the ends of its relay.
        carry: Asks the relay of a host to carry messages, with a number that counts its calls from 1.
        collect: Asks the relay of a host for what it has not brought yet.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        *,
        carry: Callable[[int, int, Sequence[Message]], Future[Relayed]],
        collect: Callable[[int], Future[Relayed]],
    ) -> None:
        self._hosts = tuple(map(tuple, hosts))
        self._carry = carry
        self._collect = collect
        self._place = {rank: (host, end) for host, ranks in enumerate(hosts) for end, rank in enumerate(ranks)}
        self._numbers = [itertools.count(1) for _ in hosts]
        self._outward: list[list[Message]] = [[] for _ in hosts]
        self._inward: dict[int, deque[bytes]] = {rank: deque() for rank in self._place}
        self._changed = threading.Condition()
        self._num_rings = 0
        self._num_asked = [0] * len(hosts)  # calls under way
        self._early: list[list[Relayed]] = [[] for _ in hosts]  # what came before something that was given earlier
        self._num_taken = [0] * len(hosts)
        self._are_missing = [False] * len(hosts)  # answers, that no call under way will bring
        self._gone: set[int] = set()

    def put(self, rank: int, message: bytes) -> bool:
        """Send to a replica, with the next `flush`."""
        host, end = self._place[rank]
        self._outward[host].append((end, message))
        return True

    def flush(self) -> None:
        """Send what was put: one call for each host."""
        for host, messages in enumerate(self._outward):
            if messages:
                self._outward[host] = []
                self._ask(host, partial(self._carry, host, next(self._numbers[host]), messages))

    def _ask(self, host: int, ask: Callable[[], Future[Relayed]]) -> None:
        with self._changed:
            self._num_asked[host] += 1
            self._are_missing[host] = False
        # A thread of Ray's runs this: it must not call Ray, and end soon.
        ask().add_done_callback(lambda future: self._told(host, future))

    def _told(self, host: int, future: Future[Relayed]) -> None:
        failed = future.cancelled() or future.exception() is not None
        with self._changed:
            self._num_asked[host] -= 1
            if failed:  # the relay's process is gone, and with it what it had of the others
                self._gone.update(self._hosts[host])
            else:
                self._early[host].append(future.result())
                self._take_early(host)
            self._num_rings += 1
            self._changed.notify_all()

    def _take_early(self, host: int) -> None:
        """What was carried counts in the order in which the relay gave it away."""
        self._early[host].sort(key=lambda carried: carried.place)
        while self._early[host] and self._early[host][0].place == self._num_taken[host]:
            self._num_taken[host] += 1
            self._take(self._hosts[host], self._early[host].pop(0))

    def _take(self, ranks: Sequence[int], carried: Relayed) -> None:
        for end, message in carried.messages:
            self._inward[ranks[end]].append(message)
        self._gone.update(ranks[end] for end in carried.gone)
        self._are_missing[self._place[ranks[0]][0]] = carried.num_missing > 0

    def has_room(self, rank: int, messages: int) -> bool:
        """Whether so many messages can be put now: who awaits an answer to each never puts too many."""
        return True

    def peek(self, rank: int) -> bytes | None:
        """The oldest message of a replica, which stays until `drop`."""
        messages = self._inward[rank]
        return messages[0] if messages else None

    def drop(self, rank: int) -> None:
        """The oldest message of a replica has been dealt with."""
        self._inward[rank].popleft()

    def lives(self, rank: int) -> bool:
        """Whether nobody has found its process, or that of its relay, gone."""
        return rank not in self._gone

    def count(self) -> int:
        """Of news so far: take it before looking for some, and give it to `wait`."""
        return self._num_rings

    def wait(self, seen: int, seconds: float) -> None:
        """Return once there are news since `seen`, after `seconds` or less."""
        for host, are_missing in enumerate(self._are_missing):
            if are_missing and not self._num_asked[host]:
                self._ask(host, partial(self._collect, host))
        with self._changed:
            self._changed.wait_for(lambda: self._num_rings != seen, min(seconds, LOOK_S))

    def ring(self) -> None:
        """End a `wait`. Any thread may call this."""
        with self._changed:
            self._num_rings += 1
            self._changed.notify_all()

    def late_ticket(self, rank: int) -> None:
        """There is none: who takes the place of a dead one is asked by Ray, and so are all with it."""
        with self._changed:
            self._gone.add(rank)

    def close(self) -> None:
        """Nothing is held here: relays end with their processes."""
