"""Messages between two ranks of a group for `ray.util.collective`, over gloo, whatever the backend of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import final

import torch

from raydist.collectives.base import Membership
from raydist.collectives.process_group import RawGroup, RawWork
from raydist.collectives.rendezvous import connect_store, local_address
from raydist.collectives.tensors import describe_tensor, stage_bytes
from raydist.collectives.translation import translate_torch_error
from raydist.compat.torch_internals import gloo_group
from raydist.errors import CollectiveMismatchError, InvalidArgumentError

__all__ = ["PointToPoint"]

_HEADER_BYTES = 256


@final
class PointToPoint:
    """The messages of one rank, which arrive in the order in which they are sent. For use by one thread.

    The first message between two ranks connects them. Tensors of a GPU travel by way of the host.

    Args:
        membership: Membership of the rank, with the address of the rendezvous store.
        timeout_s: Limit of every wait, in seconds.
    """

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        self._groups: dict[int, RawGroup] = {}

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Send a tensor to a rank, which must call `recv`. Blocking: at most the limit for each of two parts."""
        data = stage_bytes(tensor.detach().cpu()).carrier
        header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
        text = f"{data.numel()}\n{describe_tensor(tensor)}".encode()[:_HEADER_BYTES]
        header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._run(f"send(to={destination})", destination, [header, data], lambda group: group.send)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Receive into a tensor from a rank. Blocking: until the message has arrived, at most the limit for each part.

        Raises:
            CollectiveMismatchError: The message has another shape or dtype. It is dropped.
        """
        name, said = f"recv(from={source})", describe_tensor(tensor)
        header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
        self._run(name, source, [header], lambda group: group.recv)
        length, theirs = bytes(header.tolist()).rstrip(b"\0").decode(errors="replace").split("\n", 1)
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self._run(name, source, [data], lambda group: group.recv)
        staged = stage_bytes(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        if staged.carrier.numel() != data.numel() or not said.startswith(theirs):
            raise CollectiveMismatchError(
                f"A message must have one shape and dtype on both ends, got {said} on rank {self._membership.rank} for "
                f"{theirs} from rank {source}."
            )
        staged.carrier.copy_(data)
        tensor.detach().copy_(staged.values)

    def close(self) -> None:
        """Disconnect. May be called twice."""
        self._groups.clear()

    def _run(
        self,
        name: str,
        peer: int,
        parts: Sequence[torch.Tensor],
        start: Callable[[RawGroup], Callable[[list[torch.Tensor], int, int], RawWork]],
    ) -> None:
        try:
            group = self._group(peer)
            for part in parts:
                if part.numel():  # gloo never ends a message without elements
                    start(group)([part], int(peer > self._membership.rank), 0).wait()
        except RuntimeError as error:
            raise translate_torch_error(error, self._membership, name) from error

    def _group(self, peer: int) -> RawGroup:
        """Return the connection to a rank. The first call connects, at most until the limit."""
        mine, world_size = self._membership.rank, self._membership.world_size
        if peer == mine or not 0 <= peer < world_size:
            raise InvalidArgumentError(
                f"A message must go to another rank of group {self._membership.group!r}, 0 to {world_size - 1}, got "
                f"{peer} on rank {mine}."
            )
        if peer not in self._groups:
            low, high = sorted((mine, peer))
            pair = replace(self._membership, group=f"{self._membership.group}/messages-{low}-{high}")
            store, timeout = connect_store(pair, self._timeout_s), timedelta(seconds=self._timeout_s)
            hostname = local_address(pair)
            self._groups[peer] = gloo_group(store, int(mine > peer), 2, timeout=timeout, hostname=hostname)
        return self._groups[peer]
