"""One generation of a group of chips, as its rank's communicator uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import final

import torch
from torch._C._distributed_c10d import Store

from raydist.collectives.base import Membership
from raydist.collectives.flights import Flight
from raydist.collectives.xla.chip import Chip
from raydist.collectives.xla.flight import XlaFlight, XlaQueue
from raydist.collectives.xla.mail import Arrival, Parcel
from raydist.collectives.xla.meeting import XlaMeeting
from raydist.collectives.xla.neighbour import Neighbour
from raydist.errors import FailedPreconditionError
from raydist.values import ReduceOp

__all__ = ["XlaGroup"]


@final
class XlaGroup:
    """The chips of a slice, each a rank. Which rank has which is for the group to find out: libtpu numbers chips.

    Args:
        store: Of this generation.
        membership: This rank's place.
        chip: This rank's, open.
        timeout_s: The limit of connecting.
    """

    def __init__(self, store: Store, membership: Membership, chip: Chip, timeout_s: float) -> None:
        self._store = store
        self._membership = membership
        self._chip = chip
        self._neighbour = Neighbour(membership, timeout_s)
        self._queue = XlaQueue(XlaMeeting(store, membership, self._neighbour), chip)
        self._ordinals: tuple[int, ...] = ()
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    def start(self) -> XlaGroup:
        """Find out which rank has which chip. Blocking: until all ranks have said so, at most the store's limit.

        Raises:
            FailedPreconditionError: The chips of the slice are not one a rank.
        """
        rank, world_size = self._membership.rank, self._membership.world_size
        self._store.set(f"ordinal/{rank}", str(self._chip.ordinal))
        self._ordinals = tuple(int(self._store.get(f"ordinal/{other}")) for other in range(world_size))
        if self._chip.num_chips != world_size or sorted(self._ordinals) != list(range(world_size)):
            raise FailedPreconditionError(
                f"Each of the {world_size} replicas must have one of the slice's chips, but torch_xla sees "
                f"{self._chip.num_chips} chips in all, and ranks have numbers {', '.join(map(str, self._ordinals))}. "
                "Name the topology and accelerator_version of the slice, and let TPUStrategy have all of it."
            )
        if world_size > 1:
            self._neighbour.connect(self._store)
        return self

    def close(self) -> None:
        """Leave: this is how the others notice. May be called twice."""
        self._neighbour.close()

    @property
    def stuck(self) -> bool:
        """See `XlaQueue.stuck`."""
        return self._queue.stuck

    def give_up(self) -> None:
        """See `XlaQueue.give_up`."""
        self._queue.give_up()

    def meet(self, call: str) -> XlaFlight:
        """Until all ranks are there."""
        return self._queue.add(call, None)

    def all_reduce(self, call: str, values: torch.Tensor, op: ReduceOp) -> XlaFlight:
        """The reduction over ranks, in all of them."""
        return self._queue.add(call, lambda: self._chip.all_reduce(values, op))

    def all_gather(self, call: str, values: torch.Tensor) -> XlaFlight:
        """Everyone's values, along a new first dimension; `by_rank` has them in order."""
        return self._queue.add(call, lambda: self._chip.all_gather(values))

    def all_to_all(self, call: str, parts: Sequence[torch.Tensor]) -> XlaFlight:
        """What everyone has for this rank, by `by_rank`; `parts` is what it has for each."""
        by_ordinal = torch.stack([parts[self._ordinals.index(ordinal)] for ordinal in range(len(parts))])
        return self._queue.add(call, lambda: self._chip.all_to_all(by_ordinal))

    def by_rank(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        """What was gathered, in the order of ranks."""
        return [gathered[ordinal] for ordinal in self._ordinals]

    def send(self, tensor: torch.Tensor, destination: int) -> Flight:
        """A message to one rank."""
        number = self._num_sent[destination]
        self._num_sent[destination] += 1
        return Parcel(self._store, self._membership.rank, destination, number, tensor)

    def receive(self, tensor: torch.Tensor, source: int) -> Flight:
        """A message from one rank."""
        number = self._num_received[source]
        self._num_received[source] += 1
        return Arrival(self._store, source, self._membership.rank, number, tensor)
