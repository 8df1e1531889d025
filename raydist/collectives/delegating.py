"""Communicators that wrap another one: the base class, one with another time limit, and one that reduces on a root."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch

from raydist.collectives.base import ALL_REDUCE, Communicator, FinishingWork, Work
from raydist.collectives.tensors import COMBINERS, check_reducible, rows_name
from raydist.core.errors import SpecError
from raydist.core.values import ReduceOp

T = TypeVar("T")
Accumulate = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class DelegatingCommunicator(Communicator):
    """Base class of communicators that forward to another one. Subclasses override `around` and `during`.

    Args:
        inner: The other communicator, which this object owns from now on.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.membership = inner.membership
        self.timeout_s = inner.timeout_s
        self.device = inner.device
        self.checks_itself = inner.checks_itself
        self.host_runs_ahead = inner.host_runs_ahead

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        """Start a collective.

        Args:
            what: The collective and its arguments: "all_reduce(SUM)".
            tensor: A tensor with the dtype and shape that must be the same on all ranks.
        """
        return start()

    def during(self, what: str, call: Callable[[], T]) -> T:
        """Run a blocking collective; messages show `what`."""
        return call()

    def announce(self, what: str) -> None:
        self._inner.announce(what)

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._inner.copy_to_host(tensor)

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        return self.during(what, lambda: self._inner.exchange_on_host(data, what))

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        return self.during(f"allocate({len(sizes)} tensors)", lambda: self._inner.allocate(sizes))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self.around(ALL_REDUCE[op], tensor, lambda: self._inner.all_reduce(tensor, op))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self.around("all_gather", tensor, lambda: self._inner.all_gather(outputs, tensor))

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self.around(rows_name(outputs), tensor[:0], lambda: self._inner.all_gather_rows(outputs, tensor))

    def all_to_all_rows(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], lengths: Sequence[Sequence[int]]
    ) -> Work:
        what = f"all_to_all_rows({sum(map(sum, lengths))} in all)"
        return self.around(what, inputs[0][:0], lambda: self._inner.all_to_all_rows(outputs, inputs, lengths))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self.around(f"broadcast(root={root})", tensor, lambda: self._inner.broadcast(tensor, root))

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


@final
class LimitedCommunicator(DelegatingCommunicator):
    """A communicator that calls another one, which still belongs to its owner, with a time limit of its own.

    Exchanges on the host keep the limit of the other communicator.
    """

    def __init__(self, inner: Communicator, limit_s: float) -> None:
        super().__init__(inner)
        self.timeout_s = limit_s

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        work = start()
        return FinishingWork(lambda limit_s: work.wait(self.timeout_s if limit_s is None else limit_s))


@final
@dataclass(frozen=True, slots=True)
class RootReduction:
    """The rank and the function that sum tensors."""

    root: int  # number of the rank
    # returns the sum of a list of tensors in the order of ranks; None to add them one by one
    function: Accumulate | None = None


@final
class RootReducingCommunicator(DelegatingCommunicator):
    """A communicator whose `all_reduce` adds up tensors on one rank. At most one all-reduce is pending at a time.

    Every rank gathers the tensors of all ranks; the root adds them up, and broadcasts the result. Only strategies with
    `cross_device_ops=ReductionToOneDevice(...)` use it.
    """

    def __init__(self, inner: Communicator, accumulation: RootReduction) -> None:
        super().__init__(inner)
        self._accumulation = accumulation
        self._under_way: Work | None = None

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        self._settle()
        return start()

    def during(self, what: str, call: Callable[[], T]) -> T:
        self._settle()
        return call()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        check_reducible(tensor.dtype, op)
        self._settle()
        target, root = tensor.detach(), self._accumulation.root
        parts = [torch.empty_like(target) for _ in range(self.world_size)]
        gathering = self._inner.all_gather(parts, target)

        def conclude() -> None:
            if self.rank == root:
                target.copy_(self._reduced(parts, op))
            self._inner.broadcast(target, root).wait()

        self._under_way = FinishingWork(gathering.wait, conclude)
        return self._under_way

    def _settle(self) -> None:
        """Wait for the pending reduction, so that all ranks call the inner communicator in the same order."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.wait()

    def _reduced(self, parts: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
        function, one = self._accumulation.function, parts[0]
        if function is None or op not in (ReduceOp.SUM, ReduceOp.MEAN):
            result = functools.reduce(COMBINERS[op], parts)
        else:
            result = function(parts)
            if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (one.shape, one.dtype):
                raise SpecError(
                    f"accumulation_fn must return one tensor like those it is given ({one.dtype} "
                    f"{tuple(one.shape)}), got {result!r:.200}. Return their sum."
                )
        return result / len(parts) if op is ReduceOp.MEAN else result
