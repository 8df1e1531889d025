"""Backend "RAYDIST" of `ray.util.collective`, on raydist's communicators; messages between two ranks go over gloo.

Ray's registry of backends is per process: call :func:`register` in the driver and in every actor that joins a group.
The group's `communicator` has the features that Ray's functions lack: work handles, limits, abort, MEAN.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, final

import numpy as np
import ray
import torch
from ray.util import collective
from ray.util.collective import types
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.checked import CheckedCommunicator
from raydist.collectives.opening import AUTO, open_communicator
from raydist.collectives.process_group import RawGroup, RawWork
from raydist.collectives.rendezvous import RendezvousStore, connect_store, local_address
from raydist.collectives.tensors import check_parts, describe_tensor, stage_bytes
from raydist.collectives.translation import translate_torch_error
from raydist.compat.ray_internals import gcs_client
from raydist.compat.torch_internals import gloo_group
from raydist.core.errors import CollectiveMismatchError, DeadlineExceededError, InvalidArgumentError
from raydist.core.values import ReduceOp

BACKEND = "RAYDIST"

_DEFAULT_TIMEOUT_S = 300.0
_HEADER_BYTES = 256  # of a message: length, dtype and shape
_OPS = {
    types.ReduceOp.SUM: ReduceOp.SUM,
    types.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    types.ReduceOp.MIN: ReduceOp.MIN,
    types.ReduceOp.MAX: ReduceOp.MAX,
}


@final
@dataclass(frozen=True, slots=True)
class _Terms:
    """Settings of a group that Ray's constructor call cannot pass."""

    membership: Membership | None = None
    device: torch.device = torch.device("cpu")
    timeout_s: float = _DEFAULT_TIMEOUT_S
    backend: str = AUTO


_TERMS: ContextVar[_Terms] = ContextVar("raydist_group_terms", default=_Terms())  # noqa: B039  # frozen


def register() -> None:
    """Register the backend with Ray in this process. May be called twice."""
    if not collective.is_backend_available(BACKEND):
        register_collective_backend(BACKEND, RaydistGroup)


def create_group(
    membership: Membership, *, device: torch.device, timeout_s: float, backend: str = AUTO
) -> Communicator:
    """Join a Ray collective group named `membership.group` from inside an actor, and return its communicator.

    An earlier generation of the group is left before.

    `ray.util.collective.allreduce(tensor, membership.group)` and similar functions then work on the group until
    :func:`destroy_group`. Ray's functions compare the calls of all ranks first; the communicator does not.

    Args:
        timeout_s: Limit of the joining and of every collective, in seconds.
        backend: Name of the backend, as for `open_communicator`.

    Blocking: until every member has joined, at most `timeout_s` seconds.

    Raises:
        DeadlineExceededError: A member did not arrive; the message says which.
    """
    register()
    destroy_group(membership.group)
    with group_limits(membership, device=device, timeout_s=timeout_s, backend=backend):
        collective.init_collective_group(
            membership.world_size, membership.rank, backend=types.Backend(BACKEND), group_name=membership.group
        )
    group: RaydistGroup = collective.get_group_handle(membership.group)
    return group.communicator


def destroy_group(name: str) -> None:
    """Leave a group. Does nothing if this process has no group of this name."""
    if collective.is_group_initialized(name):
        collective.destroy_collective_group(name)


@contextlib.contextmanager
def group_limits(
    membership: Membership | None = None, *, device: torch.device, timeout_s: float, backend: str = AUTO
) -> Iterator[None]:
    """Set device, limit and backend of the groups that Ray's own functions create inside the block."""
    token = _TERMS.set(_Terms(membership, device, timeout_s, backend))
    try:
        yield
    finally:
        _TERMS.reset(token)


@final
class RaydistGroup(BaseGroup):
    """One member of a group, with the interface of Ray. Every method blocks until the result is complete.

    Ray creates it (`init_collective_group`, `create_collective_group`). Without a membership from :func:`create_group`,
    rank 0 opens the rendezvous store and publishes the store's address in Ray's internal key-value store.

    Attributes:
        communicator: The communicator of the group.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        terms = _TERMS.get()
        self._store: RendezvousStore | None = None
        membership = terms.membership or self._rendezvous(terms.timeout_s)
        try:
            self.communicator: Communicator = open_communicator(
                membership, device=terms.device, timeout_s=terms.timeout_s, backend=terms.backend
            )
        finally:  # a later group of this name must not find the address, whether or not this one could be formed
            if self._store is not None:
                gcs_client().internal_kv_del(self._key(), False, None)
        self._checked = CheckedCommunicator(self.communicator)
        self._messages = PointToPoint(membership, terms.timeout_s)

    @classmethod
    def backend(cls) -> str:
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        return torch.distributed.is_available()

    def destroy_group(self) -> None:
        self._messages.close()
        self.communicator.close()
        if self._store is not None:
            self._store.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = types.AllReduceOptions) -> None:
        self._checked.all_reduce(_tensor(tensor), _op(allreduce_options)).wait()

    def barrier(self, barrier_options: Any = None) -> None:
        self._checked.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = types.ReduceOptions) -> None:
        mine = _tensor(tensor)
        whole = mine if self.rank == reduce_options.root_rank else mine.clone()
        self._checked.all_reduce(whole, _op(reduce_options)).wait()

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None) -> None:
        outputs, mine = [_tensor([output]) for output in tensor_list[0]], _tensor(tensor)
        # All members have the same lengths, so all choose the same collective.
        uneven = any(output.shape != outputs[0].shape for output in outputs)
        gather = self._checked.all_gather_rows if uneven else self._checked.all_gather
        gather(outputs, mine).wait()

    def broadcast(self, tensor: list[Any], broadcast_options: Any = types.BroadcastOptions) -> None:
        self._checked.broadcast(_tensor(tensor), broadcast_options.root_rank).wait()

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[list[Any]],
        reducescatter_options: Any = types.ReduceScatterOptions,
    ) -> None:
        output, inputs = _tensor(tensor), [_tensor([value]) for value in tensor_list[0]]
        check_parts("reducescatter", inputs, output, self.world_size)
        parts = torch.stack(inputs)
        self._checked.all_reduce(parts, _op(reducescatter_options)).wait()
        output.copy_(parts[self.rank])

    def send(self, tensor: list[Any], send_options: Any) -> None:
        self._messages.send(_tensor(tensor), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        self._messages.recv(_tensor(tensor), recv_options.src_rank)

    def _rendezvous(self, timeout_s: float) -> Membership:
        if self.rank == 0:
            self._store = RendezvousStore(ray.util.get_node_ip_address()).start()
            address = f"{self._store.port} {self._store.host}"
            gcs_client().internal_kv_put(self._key(), address.encode(), True, None)
        else:
            address = self._await_address(timeout_s)
        port, host = address.split(" ")
        return Membership(self.group_name, 0, self.rank, self.world_size, host, int(port))

    def _await_address(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            value: bytes | None = gcs_client().internal_kv_get(self._key(), None)
            if value is not None:
                return value.decode()
            if time.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"Rank {self.rank} of group {self.group_name!r} waited {timeout_s} s for rank 0, which did not "
                    "come. Check that rank 0 joins a group of this name, and that the name was not used before."
                )
            time.sleep(0.02)

    def _key(self) -> bytes:
        # Two jobs on one cluster may use the same group name.
        job = ray.get_runtime_context().get_job_id()
        return f"raydist/collective/{job}/{self.group_name}".encode()


def _tensor(values: list[Any]) -> torch.Tensor:
    """Return the only tensor of Ray's list. A tensor made of a numpy array shares the array's memory."""
    (value,) = values
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    raise InvalidArgumentError(
        f"A collective needs a torch tensor or a numpy array, got {type(value).__name__}. Use torch.as_tensor(value)."
    )


def _op(options: Any) -> ReduceOp:
    return _OPS[options.reduceOp]


@final
class PointToPoint:
    """The messages of one rank over gloo, in the order in which they are sent. For use by one thread.

    The first message between two ranks connects them. Tensors of a GPU travel by way of the host.
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
