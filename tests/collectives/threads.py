"""Ranks as threads of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from raydist.collectives.base import Membership
from raydist.collectives.local import LocalGroup, LocalHub

T = TypeVar("T")

TIMEOUT_S = 20.0


def run_ranks(world_size: int, body: Callable[[LocalGroup], T], *, timeout_s: float = TIMEOUT_S) -> list[T]:
    """Run `body` on every rank of a new group: the results in rank order, or the first rank's error."""
    hub = LocalHub()
    outcomes: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def rank_main(rank: int) -> None:
        group = LocalGroup(hub, Membership("test", 0, rank, world_size), timeout_s)
        try:
            outcomes[rank] = body(group.start())
        except BaseException as error:  # handed to the test's own thread
            errors[rank] = error
            group.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[min(errors)]
    return [outcomes[rank] for rank in range(world_size)]
