"""The step functions that the driver has sent to a replica: each is unpickled once, and watched for mutated copies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, final

from raydist.errors import FailedPreconditionError
from raydist.mirroring.on_replica.captures import CaptureWatch
from raydist.mirroring.shipment import Shipment

__all__ = ["SentFunctions"]


@final
class SentFunctions:
    """The cache of unpickled step functions on one replica.

    Args:
        loads: Unpickles a function.
        is_shared: Returns True for an object that is not a copy (a mirrored one, the strategy).
        rank: Rank of the replica. Rank 0 checks after each run for changes of copies in the function.
    """

    def __init__(self, loads: Callable[[bytes], Any], is_shared: Callable[[Any], bool], rank: int) -> None:
        self._loads = loads
        self._is_shared = is_shared
        self._rank = rank
        self._functions: dict[bytes, tuple[bytes, Any]] = {}
        self._watches: dict[bytes, CaptureWatch] = {}
        self._running: CaptureWatch | None = None
        self._remarks: dict[str, bool] = {}  # and whether the driver is still to be told

    def function_of(self, shipment: Shipment) -> Any:
        """The function of a shipment, which runs next."""
        self._running = None
        if not shipment.digest:
            return self._loads(shipment.function)
        if shipment.function:
            function = self._loads(shipment.function)
            self._functions[shipment.digest] = (shipment.function, function)
            if self._rank == 0:
                self._watches[shipment.digest] = CaptureWatch(function, self._is_shared)
        if shipment.digest not in self._functions:
            raise FailedPreconditionError(
                f"raydist bug: replica {self._rank} was sent the digest of a function that it does not have."
            )
        self._running = self._watches.get(shipment.digest)
        return self._functions[shipment.digest][1]

    def after_run(self) -> None:
        """Record the changes that the function, which has run to its end, made to copies."""
        remark = self._running.after_run() if self._running is not None else ""
        if remark:
            self._remarks.setdefault(remark, True)

    def take_remarks(self) -> tuple[str, ...]:
        """Return the new warnings for the program, each once."""
        if not any(self._remarks.values()):
            return ()
        told = tuple(remark for remark, untold in self._remarks.items() if untold)
        self._remarks.update(dict.fromkeys(told, False))
        return told

    def forget(self, digests: Collection[bytes]) -> None:
        """The driver will not name these again."""
        for digest in digests:
            self._functions.pop(digest, None)
            self._watches.pop(digest, None)

    def clear(self) -> None:
        """They refer to objects that are gone; the driver sends them again."""
        self._functions.clear()
        self._watches.clear()
