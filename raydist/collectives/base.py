"""The seam between training and the wires: what a group of ranks can do together.

Every backend (threads, gloo, NCCL, ...) implements :class:`Communicator` and passes the one contract suite in
`tests/contracts/communicator.py`. A group is *rebuildable*: after a peer died, `reconfigure` forms a new generation
of it in the same process, with other members.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from raydist.errors import FailedPreconditionError
from raydist.values import ReduceOp

__all__ = [
    "ALL_REDUCE",
    "Backend",
    "Communicator",
    "Declined",
    "FinishingWork",
    "JoiningCommunicator",
    "Membership",
    "Work",
]

ALL_REDUCE = {op: f"all_reduce({op.value})" for op in ReduceOp}
"""The names of all-reduces in messages, and where ranks compare their calls."""


@final
@dataclass(frozen=True, slots=True)
class Membership:
    """The place of one rank in one generation of a group.

    Attributes:
        group: Unique name of the group: never used by two groups of a cluster.
        generation: 0 for the first members, one more after every change. Old generations are refused.
        rank: This process's place, 0 .. world_size - 1.
        world_size: Number of members.
        store_host: Host of the rendezvous store (a torch TCPStore) of this generation, empty where none is needed.
        store_port: Its port.
        hosts: By rank, the host that each is on: ranks of equal ones share memory. Empty where nobody knows.
    """

    group: str
    generation: int
    rank: int
    world_size: int
    store_host: str = ""
    store_port: int = 0
    hosts: tuple[str, ...] = ()

    def check_successor(self, later: Membership) -> None:
        """Raise FailedPreconditionError where `later` does not come after this one in the same group.

        >>> Membership("g", 1, 0, 2).check_successor(Membership("g", 1, 0, 1))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        raydist.errors.FailedPreconditionError: A new generation of group 'g' must be later than 1, got 1. Ask the ...
        """
        if later.group == self.group and later.generation <= self.generation:
            raise FailedPreconditionError(
                f"A new generation of group {self.group!r} must be later than {self.generation}, "
                f"got {later.generation}. Ask the owner of the group for the present membership."
            )


class Work(ABC):
    """A collective that has been started."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the result is there (for a GPU: until the current stream may use it).

        Args:
            timeout_s: Seconds; None for the communicator's own limit.

        Raises:
            DeadlineExceededError: The limit is over; the message names this rank, the operation and the group.
            UnavailableError: A peer is gone.
            CancelledError: `abort` was called.
        """


@final
class FinishingWork(Work):
    """A collective that its rank finishes itself.

    Args:
        wait: Blocks until the collective has run, at most so many seconds; None for the group's own limit.
        finish: Called once, by the first `wait` that succeeds.
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
    """One rank's end of a group. Collectives must be called in the same order by every rank.

    Tensors are worked on in place and may not be touched until the `Work` is done. Every wait ends after `timeout_s`.

    Attributes:
        membership: This rank's place in the present generation.
        timeout_s: The limit of every wait, in seconds.
        device: Where the tensors are.
    """

    membership: Membership
    timeout_s: float
    device: torch.device = torch.device("cpu")

    @property
    def rank(self) -> int:
        return self.membership.rank

    @property
    def world_size(self) -> int:
        return self.membership.world_size

    @property
    def checks_itself(self) -> bool:
        """True if ranks that call different things get a CollectiveMismatchError from the collectives themselves.

        Where it is True nothing need be agreed on before a call: name, op, dtype, shape, root and order are compared.
        """
        return False

    def announce(self, what: str) -> None:  # noqa: B027  # nothing to be done by those that show nothing
        """Say what the next collective is for, where messages would show its own arguments."""

    @property
    def host_runs_ahead(self) -> bool:
        """Return True if `Work.wait` makes the device's stream wait instead of the host, as on a GPU.

        What a collective has brought is then read later, by `copy_to_host`.
        """
        return False

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a tensor to the host; the function that is returned waits for the copy and returns it."""
        copied = tensor.detach().cpu()
        return lambda: copied

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        """Return every rank's data, by rank. The data of ranks may have different lengths.

        For what ranks seldom tell each other, such as a new layout. The device is not involved where it has a queue of
        its own (`host_runs_ahead`).

        Args:
            data: This rank's.
            what: The purpose, for messages.

        Blocking: until all ranks have called it, at most the communicator's limit.
        """
        self.announce(what)
        mine = torch.frombuffer(bytearray(struct.pack("<q", len(data)) + data), dtype=torch.uint8)
        size = torch.tensor([len(mine)], device=self.device)
        sizes = [torch.empty_like(size) for _ in range(self.world_size)]
        self.all_gather(sizes, size).wait()
        longest = max(int(each) for each in sizes)
        self.announce(what)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = [torch.empty(longest, dtype=torch.uint8, device=self.device) for _ in range(self.world_size)]
        self.all_gather(rows, padded.to(self.device)).wait()
        received = [bytes(row.cpu().numpy()) for row in rows]
        return [row[8 : 8 + struct.unpack_from("<q", row)[0]] for row in received]

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Flat, uninitialised tensors on which `all_reduce` is as cheap as this group can make it.

        A collective: every rank calls it with equal sizes, at the same place in its sequence of collectives. The memory
        is given back when the tensors are dropped, and its advantage ends with the generation; they stay usable.

        Args:
            sizes: Number of elements and dtype of each.

        Blocking: where memory must be shared, until every rank has called, at most the communicator's limit.
        """
        return [torch.empty(numel, dtype=dtype, device=self.device) for numel, dtype in sizes]

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        """Replace `tensor` on every rank by the reduction over ranks (MEAN divides by `world_size`)."""

    @abstractmethod
    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        """Fill `outputs[r]` with rank r's `tensor`; all of one shape and dtype."""

    @abstractmethod
    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        """Fill `outputs[r]` with rank r's `tensor`, where those may be of different lengths along axis 0.

        Every rank knows all lengths, and gives outputs of them.
        """

    @abstractmethod
    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        """Fill rank r's `outputs[s]` with rank s's `inputs[r]`; all of one shape and dtype."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Replace `tensor` by rank `root`'s."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        """Replace `tensor` on rank `root` by the reduction; elsewhere its content is undefined afterwards."""

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        """Fill rank r's `output` with the reduction of everybody's `inputs[r]`."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        """Send to one rank; matched by its `recv`."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        """Receive into `tensor` from one rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def reconfigure(self, membership: Membership) -> None:
        """Leave the present generation (aborting what is under way) and join another one."""

    @abstractmethod
    def abort(self) -> None:
        """Give up: pending and later collectives of this rank end with an error at once, and soon those of its peers.

        What every rank had entered before may still succeed on a peer. May be called from another thread than the one
        that waits.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group and release sockets, threads and files. May be called twice."""


@final
class Declined(Exception):
    """The members have agreed that this backend cannot carry their group; the message says why."""


class JoiningCommunicator(Communicator):
    """A communicator that has to meet the other members first, and anew in each generation.

    Args:
        membership: This rank's place.
        device: Where the tensors are.
        timeout_s: The limit of every wait.
    """

    def __init__(self, membership: Membership, device: torch.device, timeout_s: float) -> None:
        self.membership = membership
        self.device = device
        self.timeout_s = timeout_s
        self._prepare()

    @abstractmethod
    def start(self) -> None:
        """Join the group. Blocking: until every member has, at most `timeout_s`.

        Raises:
            DeadlineExceededError: A member did not arrive; the message says which.
            Declined: This backend cannot carry the group: on every rank alike, before anything was sent.
        """

    @abstractmethod
    def _prepare(self) -> None:
        """Make what one generation needs, for `start`."""

    def reconfigure(self, membership: Membership) -> None:
        self.membership.check_successor(membership)
        self.abort()
        self.close()
        self.membership = membership
        self._prepare()
        self.start()


class Backend(ABC):
    """A kind of connection between the ranks of a group on some kind of device.

    A new one is a file of its own and a line in `opening.py`; the tests then ask for its ranks and check the
    contract of communicators on them.

    Attributes:
        name: What it is chosen by.
        devices: Kinds of devices that it serves: "cpu", "cuda", "xla".
    """

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]

    def declines(self, membership: Membership) -> str | None:
        """Why it cannot carry a group, as far as its membership tells; every member comes to the same answer."""
        return None

    @abstractmethod
    def communicator(self, membership: Membership, device: torch.device, timeout_s: float) -> JoiningCommunicator:
        """One rank's end of a group, which it has not joined yet."""
