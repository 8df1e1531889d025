"""What travels between the two halves of mirroring, and the port through which the driver half reaches the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from raydist.values import PerReplica

__all__ = ["ReplicaLink", "Shipment"]


class ReplicaLink(Protocol):
    """How the driver half calls the replicas' :class:`~raydist.mirroring.replica.MirrorReplica`."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas, ranks 0 .. num_replicas - 1."""

    def wait(self) -> None:
        """Block until every dispatched step is done; raises the error of a step that failed."""

    def call(self, rank: int, method: str, *args: Any) -> Any:
        """The result of a method of one replica, after all dispatched steps."""

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """The results of a method of every replica in rank order, after all dispatched steps."""


@final
@dataclass(frozen=True, slots=True)
class Shipment:
    """All that one step needs and the replicas do not have yet; the same for every replica.

    Attributes:
        released: Handles whose objects the driver's program has dropped.
        bundle: Pickle of the objects that are new to the replicas, empty for none.
        writes: Pickle of what the driver changed since the last step, empty for nothing.
        function: Pickle of the step function, empty when the replicas have it under `digest`.
        digest: Digest of the function's pickle; empty for a function that is not to be kept.
        forget: Digests of functions that will not be named again.
        arguments: Pickle of `(args, kwargs)`, with placeholders for `PerReplica` leaves.
        per_replica: The leaves behind the placeholders, by number. They stay with the driver.
    """

    released: tuple[int, ...] = ()
    bundle: bytes = b""
    writes: bytes = b""
    function: bytes = b""
    digest: bytes = b""
    forget: tuple[bytes, ...] = ()
    arguments: bytes = b""
    per_replica: tuple[PerReplica, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of what is sent to each replica."""
        return len(self.bundle) + len(self.writes) + len(self.function) + len(self.arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.released, self.bundle, self.writes, self.function, self.digest, self.forget, self.arguments)
        return Shipment, fields

    def without_parts(self) -> Shipment:
        """What a replica receives."""
        return replace(self, per_replica=())
