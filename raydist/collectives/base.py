"""The interface of collective communication: communicators, memberships and backends.

Every backend (shared memory, gloo, NCCL, ...; `opening.py` lists them) implements :class:`Communicator` and passes the
contract suite in `tests/contracts/communicator.py`. A *generation* is one incarnation of a group: after a failure, the
members close their communicators and open new ones with the next generation's memberships.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from raydist.collectives.tensors import check_exchange, check_rows
from raydist.core.values import ReduceOp
from raydist.utils.host_copy import begin_host_copy

ALL_REDUCE = {op: f"all_reduce({op.value})" for op in ReduceOp}
"""Names of all-reduces, in messages and in the comparison of calls between ranks."""


@final
@dataclass(frozen=True, slots=True)
class Membership:
    """The membership of one rank in one generation of a group."""

    group: str  # name of the group, unique in the cluster
    generation: int  # 0 for the first members, one more after every change. Old generations are refused.
    rank: int  # rank of this process, 0 .. world_size - 1
    world_size: int  # number of members
    # host of the rendezvous store (a torch TCPStore) of this generation, empty where none is needed
    store_host: str = ""
    store_port: int = 0  # port of the rendezvous store
    # host of each rank; ranks with the same host share memory. Empty if the hosts are unknown.
    hosts: tuple[str, ...] = ()


class Work(ABC):
    """A collective that has been started."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the result is complete. On a GPU, make the current stream wait for the result instead.

        Args:
            timeout_s: Limit in seconds; None for the communicator's own limit.

        Raises:
            DeadlineExceededError: The limit has passed; the message names this rank, the operation and the group.
            UnavailableError: A peer has died or left.
            CancelledError: `abort` was called.
        """


@final
class FinishingWork(Work):
    """A collective with a final step that `wait` runs.

    Args:
        wait: Blocks until the collective has run, at most the given number of seconds; None for the group's own limit.
        finish: The final step; the first `wait` that succeeds calls it once.
    """

    def __init__(self, wait: Callable[[float | None], None], finish: Callable[[], object] | None = None) -> None:
        self._wait: Callable[[float | None], None] | None = wait
        self._finish = finish

    def wait(self, timeout_s: float | None = None) -> None:
        if self._wait is None:
            return
        self._wait(timeout_s)
        finish, self._wait, self._finish = self._finish, None, None
        if finish is not None:
            finish()


class Communicator(ABC):
    """A group of ranks, as one rank sees it. All ranks must call collectives in the same order.

    Collectives work in place and return a `Work`. The caller must not use the tensors until `Work.wait` has returned.
    Every wait ends after `timeout_s`.

    Attributes:
        membership: Membership of this rank in the present generation.
        timeout_s: Limit of every wait, in seconds.
        device: Device of the tensors.
        checks_itself: True if the collectives themselves raise CollectiveMismatchError where ranks call different
            collectives. They compare name, op, dtype, shape, root and order, so that ranks need not compare calls
            beforehand.
        host_runs_ahead: True if `Work.wait` makes the device's stream wait instead of the host, as on a GPU. The host
            then reads results by `copy_to_host`.
    """

    membership: Membership
    timeout_s: float
    device: torch.device = torch.device("cpu")
    checks_itself: bool = False
    host_runs_ahead: bool = False

    @property
    def rank(self) -> int:
        return self.membership.rank

    @property
    def world_size(self) -> int:
        return self.membership.world_size

    def announce(self, what: str) -> None:  # noqa: B027  # most communicators show nothing
        """Set the purpose of the next collective, which messages show in place of its arguments."""

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a tensor to the host. The returned function blocks until the copy is done and returns it."""
        return begin_host_copy(tensor)

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        """Return every rank's data, by rank. The data of ranks may have different lengths.

        Meant for rare exchanges, such as a new layout. Where `host_runs_ahead`, the exchange does not use the device.

        Args:
            what: Purpose of the exchange, for messages.

        Blocking: until all ranks have called it, at most the communicator's limit.
        """
        self.announce(what)
        mine = torch.frombuffer(bytearray(data + b"."), dtype=torch.uint8).to(self.device)  # torch refuses no bytes
        sizes = [torch.empty(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        self.all_gather(sizes, torch.tensor([len(mine)], device=self.device)).wait()
        rows = [torch.empty(int(size), dtype=torch.uint8, device=self.device) for size in sizes]
        self.announce(what)
        self.all_gather_rows(rows, mine).wait()
        return [bytes(row.cpu().numpy())[:-1] for row in rows]

    def barrier(self) -> None:
        """Block until every rank has called it."""
        self.exchange_on_host(b"", "barrier")

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Return flat, uninitialised tensors on which `all_reduce` is fastest.

        This is a collective: all ranks call it with equal sizes. The memory is freed with the tensors. After the end of
        the generation the tensors stay usable but lose their advantage.

        Args:
            sizes: Number of elements and dtype of each tensor.

        Blocking: where memory must be shared, until every rank has called it, at most the communicator's limit.
        """
        return [torch.empty(numel, dtype=dtype, device=self.device) for numel, dtype in sizes]

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        """Replace `tensor` on every rank by the reduction over ranks (MEAN divides by `world_size`)."""

    @abstractmethod
    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        """Fill `outputs[r]` with rank r's `tensor`. All tensors have one shape and dtype."""

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        """Fill `outputs[r]` with rank r's `tensor`. The tensors may have different lengths along axis 0.

        Every rank must know all lengths, and pass outputs of these lengths.
        """
        check_rows(outputs, tensor, self.rank, self.world_size)
        longest = max(len(output) for output in outputs)
        padded = tensor.detach().new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor.detach()
        parts = [torch.empty_like(padded) for _ in outputs]

        def cut() -> None:
            for output, part in zip(outputs, parts, strict=True):
                output.detach().copy_(part[: len(output)])

        return FinishingWork(self.all_gather(parts, padded).wait, cut)

    def all_to_all_rows(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], lengths: Sequence[Sequence[int]]
    ) -> Work:
        """Send `inputs[r]` to rank r, and fill `outputs[r]` with what rank r sends to this one.

        Args:
            lengths: For each rank, the number of rows (along axis 0) that it sends to each rank; the same on all ranks.
        """
        check_exchange(outputs, inputs, lengths, self.rank)
        sent = torch.cat(inputs)
        everything = [sent.new_empty(sum(row), *sent.shape[1:]) for row in lengths]

        def cut() -> None:
            for output, whole, row in zip(outputs, everything, lengths, strict=True):
                begin = sum(row[: self.rank])
                output.detach().copy_(whole[begin : begin + len(output)])

        return FinishingWork(self.all_gather_rows(everything, sent).wait, cut)

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Replace `tensor` by the tensor of rank `root`."""

    @abstractmethod
    def abort(self) -> None:
        """Abort the group: pending and later collectives raise an error, at once on this rank and soon on its peers.

        A collective that every rank has called already may still succeed on a peer. May be called from any thread.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group and release sockets, threads and files. May be called twice."""


@final
class Declined(Exception):
    """Raised where all members agree that a backend cannot serve their group; the message says why."""


class Backend(ABC):
    """An implementation of collectives for some types of devices.

    A new backend is a file of its own and a line in `opening.py`; the tests then check the contract of communicators.

    Attributes:
        name: Name for the choice of a backend.
        devices: Types of the devices that the backend serves: "cpu", "cuda", "xla".
    """

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]

    def declines(self, membership: Membership) -> str | None:
        """Return the reason why the backend cannot serve a group, if any. All members get the same answer."""
        return None

    @abstractmethod
    def open(self, membership: Membership, device: torch.device, timeout_s: float) -> Communicator:
        """Join a group and return the communicator of one rank.

        Blocking: until every member has joined, at most `timeout_s` seconds for each wait.

        Raises:
            DeadlineExceededError: A member did not arrive; the message says which.
            Declined: This backend cannot serve the group. All ranks raise it.
        """
