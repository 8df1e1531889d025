"""Messages between two ranks, through the store: XLA has none that only two of all chips take part in."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from typing import final

import torch
from torch._C._distributed_c10d import Store

from raydist.collectives.flat_bytes import flat_bytes
from raydist.collectives.rendezvous import peek, write
from raydist.errors import CollectiveMismatchError

__all__ = ["Arrival", "Parcel"]

_POLL_S = 0.002


class _Errand:
    """One end of one message. Those of two ranks lie in one entry, one after another: it is taken before the next."""

    def __init__(self, store: Store, source: int, destination: int, number: int) -> None:
        self._store = store
        self._entry, self._receipt = f"message/{source}/{destination}", f"taken/{source}/{destination}"
        self._number = number
        self._over = False

    def landed(self) -> bool:
        return self._over

    def wait_slice(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._over:
            self._over = self._attempt()
            if self._over or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        return self._over

    @abstractmethod
    def _attempt(self) -> bool:
        """Whether it could be done now."""


@final
class Parcel(_Errand):
    """A message on its way.

    Args:
        store: Of this generation of the group.
        source: Who sends.
        destination: Who receives.
        number: How many messages went this way before.
        tensor: What is sent, as it is now.
    """

    def __init__(self, store: Store, source: int, destination: int, number: int, tensor: torch.Tensor) -> None:
        super().__init__(store, source, destination, number)
        values = tensor.detach().cpu()
        raw = flat_bytes(values).numpy().tobytes()
        self._data = json.dumps([number, *_kind_of(tensor)]).encode() + b"\n" + raw
        self.wait_slice(0.0)

    def _attempt(self) -> bool:
        if int(peek(self._store, self._receipt) or b"0") < self._number:
            return False
        write(self._store, self._entry, self._data)
        return True


@final
class Arrival(_Errand):
    """A message that is to come, into `tensor`; the other arguments are a :class:`Parcel`'s.

    Waiting for it raises CollectiveMismatchError where what came has another shape or dtype; it is taken all the same.
    """

    def __init__(self, store: Store, source: int, destination: int, number: int, tensor: torch.Tensor) -> None:
        super().__init__(store, source, destination, number)
        self._tensor = tensor
        self._source, self._destination = source, destination

    def _attempt(self) -> bool:
        head, _, raw = (peek(self._store, self._entry) or b"[-1]\n").partition(b"\n")
        number, *kind = json.loads(head)
        if number != self._number:
            return False
        self._store.set(self._receipt, str(self._number + 1))
        self._over = True
        mine = _kind_of(self._tensor)
        if kind != mine:
            raise CollectiveMismatchError(
                f"A message must have one shape and dtype on both ends, got {' '.join(mine)} on rank "
                f"{self._destination} for {' '.join(kind)} from rank {self._source}."
            )
        if raw:
            flat = torch.frombuffer(bytearray(raw), dtype=self._tensor.dtype)
            self._tensor.detach().copy_(flat.reshape(self._tensor.shape))
        return True


def _kind_of(tensor: torch.Tensor) -> list[str]:
    return [str(tensor.dtype), str(tuple(tensor.shape))]
