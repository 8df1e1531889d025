"""Groups of CPU ranks on several hosts: shared memory inside a host, gloo between the leaders, one rank of each host.

Every collective is a sequence of steps: inside the hosts, between leaders, and inside the hosts again. A background
thread of each rank runs these steps, so that a collective proceeds while the rank computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from typing import final

import torch

from raydist.collectives.base import ALL_REDUCE, Backend, Communicator, FinishingWork, Membership, Work
from raydist.collectives.process_group import GlooBackend
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend, SharedMemoryCommunicator, open_shared
from raydist.collectives.tensors import HALVES, check_parts, check_reducible, check_root, stage_bytes
from raydist.collectives.translation import late_error
from raydist.core.errors import DeadlineExceededError, RaydistError, UnavailableError
from raydist.core.thread_shutdown import end_at_exit
from raydist.core.values import ReduceOp

_MARGIN_S = 1.0
_SLICE_S = 0.05  # interval at which a leader checks for failures on other hosts


@final
class HierarchicalBackend(Backend):
    """Backend with shared memory inside hosts and gloo between hosts; on a single host, shared memory only."""

    name = "hierarchical"
    devices = ("cpu",)

    def declines(self, membership: Membership) -> str | None:
        return None if membership.hosts else "nobody has said which of its ranks are on one host"

    def open(self, membership: Membership, device: torch.device, timeout_s: float) -> Communicator:
        hosts = tuple(dict.fromkeys(membership.hosts))
        if len(hosts) == 1:
            return SharedMemoryBackend().open(membership, device, timeout_s)
        members = tuple(rank for rank, host in enumerate(membership.hosts) if host == membership.hosts[membership.rank])
        home, leaders = open_shared(membership, timeout_s, members), None
        try:
            if members[0] == membership.rank:
                group, number = f"{membership.group}/leaders", hosts.index(membership.hosts[membership.rank])
                place = replace(membership, group=group, rank=number, world_size=len(hosts), hosts=())
                leaders = GlooBackend().open(place, device, timeout_s)
            return HierarchicalCommunicator(membership, home, leaders)
        except BaseException:
            home.close()
            raise


@final
class HierarchicalCommunicator(Communicator):
    """A communicator of ranks on several hosts. Not thread-safe, except for `abort`.

    Args:
        membership: Membership of this rank; `hosts` names at least two hosts.
        leaders: The communicator of the leaders, if this rank is one.
    """

    def __init__(self, membership: Membership, home: SharedMemoryCommunicator, leaders: Communicator | None) -> None:
        self.membership = membership
        self.timeout_s = home.timeout_s
        names = membership.hosts
        self._hosts = [tuple(rank for rank, name in enumerate(names) if name == host) for host in dict.fromkeys(names)]
        self._host = next(number for number, ranks in enumerate(self._hosts) if membership.rank in ranks)
        self._home = home
        self._leaders = leaders
        self._queue = BackgroundQueue(f"raydist-collectives-{self.rank}", self.abort)

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        self._submit("allocate", lambda: tensors.extend(self._home.allocate(sizes))).wait()
        return tensors

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        check_reducible(tensor.dtype, op)
        return self._submit(ALL_REDUCE[op], lambda: self._reduce(tensor.detach(), op))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        return self._submit("all_gather", lambda: self._gather(outputs, tensor))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        check_root(root, self.membership.group, self.world_size)
        host = next(number for number, ranks in enumerate(self._hosts) if root in ranks)

        def run() -> None:
            if host == self._host:
                self._home.broadcast(tensor, self._hosts[host].index(root)).wait()
            self._between(lambda leaders: leaders.broadcast(tensor, host))
            if host != self._host:
                self._home.broadcast(tensor, 0).wait()

        return self._submit(f"broadcast(root={root})", run)

    def abort(self) -> None:
        self._home.abort()
        if self._leaders is not None:
            self._leaders.abort()

    def close(self) -> None:
        self._queue.close()
        leaders, self._leaders = self._leaders, None  # gloo closes its sockets when its last object is deleted
        if leaders is not None:
            leaders.close()
        self._home.close()

    def _reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Replace a tensor by the reduction. A mean, and a sum of 16-bit floats, is rounded once."""
        within = ReduceOp.SUM if op is ReduceOp.MEAN else op
        values = tensor.float() if tensor.dtype in HALVES else tensor
        self._home.all_reduce(values, within).wait()
        self._between(lambda leaders: leaders.all_reduce(values, within))
        if op is ReduceOp.MEAN and self._leaders is not None:
            values.div_(self.world_size)
        self._home.broadcast(values, 0).wait()
        if values is not tensor:
            tensor.copy_(values)

    def _gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Fill `outputs` with every rank's tensor: within hosts, then between leaders, then to all ranks of a host."""
        members, mine = self._hosts[self._host], stage_bytes(tensor).carrier.view(-1, 1)
        received = [torch.empty(output.nbytes, 1, dtype=torch.uint8) for output in outputs]
        self._home.all_gather_rows([received[rank] for rank in members], mine).wait()
        whole = [torch.cat([received[rank] for rank in ranks]) for ranks in self._hosts]
        self._between(lambda leaders: leaders.all_gather_rows(whole, whole[self._host].clone()))
        everything = torch.cat(whole)
        self._home.broadcast(everything, 0).wait()
        order = [rank for ranks in self._hosts for rank in ranks]
        for rank, part in zip(order, everything.split([outputs[rank].nbytes for rank in order]), strict=True):
            staged = stage_bytes(outputs[rank])
            staged.carrier.copy_(part.view(-1))
            staged.deliver()

    def _between(self, call: Callable[[Communicator], Work]) -> None:
        """Run a collective of the leaders, if this rank is one, and poll for failures of any rank."""
        if self._leaders is None:
            return
        work, deadline = call(self._leaders), time.monotonic() + self.timeout_s
        while True:
            try:
                work.wait(_SLICE_S)
                return
            except RaydistError as error:
                generation = self._home.generation
                generation.hear()
                generation.check("the exchange between hosts")
                if not isinstance(error, DeadlineExceededError) or time.monotonic() >= deadline:
                    # The message of `error` numbers leaders, so a message with this group's rank replaces it.
                    raise type(error)(f"rank {self.rank} cannot reach the ranks of other hosts.") from error

    def _submit(self, name: str, function: Callable[[], object]) -> Work:
        self._home.generation.check(name)
        future = self._queue.submit(lambda: self._run(name, function))
        return FinishingWork(lambda timeout_s: self._wait(name, future, timeout_s))

    def _wait(self, name: str, future: futures.Future[None], timeout_s: float | None) -> None:
        # Each step of a collective has the group's limit and fails the group itself before the margin has passed.
        limit_s = self.timeout_s + _MARGIN_S if timeout_s is None else timeout_s
        if not futures.wait([future], limit_s).done:
            fatal = timeout_s is None
            error = late_error(self.membership, name, self.timeout_s if fatal else limit_s, fatal=fatal)
            if not fatal:
                raise error
            self._home.generation.fail(error)
            self._home.generation.check(name)
        future.result()

    def _run(self, name: str, function: Callable[[], object]) -> None:
        """Run a collective. An error fails the whole group, on every host."""
        try:
            function()
        except BaseException as error:
            unknown = UnavailableError(f"rank {self.rank} failed inside a collective ({error!r}).")
            generation = self._home.generation
            generation.fail(error if isinstance(error, RaydistError) else unknown)
            generation.check(name)
            raise


@final
class BackgroundQueue:
    """Queue of functions, which a daemon thread runs in order until `close`.

    Args:
        name: Name of the thread.
        stop: Called when the process ends, to end the running function. Must return at once.

    >>> background = BackgroundQueue("raydist-example", lambda: None)
    >>> background.submit(lambda: None).result()
    >>> background.close()
    """

    def __init__(self, name: str, stop: Callable[[], object]) -> None:
        self._functions: queue.SimpleQueue[tuple[Callable[[], object], futures.Future[None]] | None]
        self._functions = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        end_at_exit(thread, stop)
        thread.start()

    def submit(self, function: Callable[[], object]) -> futures.Future[None]:
        """Add a function to the queue. Does not block; the future holds the function's error."""
        future: futures.Future[None] = futures.Future()
        self._functions.put((function, future))
        return future

    def close(self) -> None:
        """End the thread after the functions that the queue holds. Does not block."""
        self._functions.put(None)

    def _run(self) -> None:
        while (submitted := self._functions.get()) is not None:
            function, future = submitted
            try:
                function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del function, future, submitted
