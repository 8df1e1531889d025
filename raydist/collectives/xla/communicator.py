"""Communicators of all chips of a TPU slice, whose collectives are XLA programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, cast, final

import torch

from raydist.collectives.base import ALL_REDUCE, Communicator, FinishingWork, Membership, Work
from raydist.collectives.generation import Generation, ProcessGroupBackend, RawGroup
from raydist.collectives.process_group import GlooBackend
from raydist.collectives.tensors import check_parts, check_root, describe_tensor, stage_reduction
from raydist.collectives.xla.chip import Chip
from raydist.collectives.xla.group import CallComparison, XlaGroup, XlaOperation
from raydist.compat.torch_internals import Store
from raydist.errors import DeadlineExceededError, FailedPreconditionError, RaydistError, UnavailableError
from raydist.values import ReduceOp

__all__ = ["XlaBackend", "XlaCommunicator", "mark_nan", "put_nan_back"]

_LATEST: dict[tuple[str, int], XlaGroup] = {}  # by group and rank: a chip that hangs must not get another group
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@final
class XlaBackend(ProcessGroupBackend):
    """Backend on the links between the chips of a TPU slice, by torch_xla. Serves one communicator at a time."""

    name = "xla"
    devices = ("xla",)

    def __init__(self) -> None:
        self._chip = Chip(0)
        self._group: XlaGroup | None = None

    def open(self, membership: Membership, device: torch.device, timeout_s: float) -> XlaCommunicator:
        self._chip = Chip(device.index or 0)
        generation = Generation.join(membership, self, timeout_s)
        try:
            return XlaCommunicator(generation, self._chip, self, _exchange_ordinals(generation, self._chip))
        except BaseException:
            self.close()
            generation.leave()
            raise

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        place = (membership.group, membership.rank)
        if place in _LATEST and _LATEST[place].stuck:
            raise UnavailableError(
                f"The chip of rank {membership.rank} is still in a collective that another chip has left, and cannot "
                "be stopped. Close the strategy and make a new one: its processes start anew."
            )
        gloo = GlooBackend().create(store, membership, timeout_s)
        self._group = _LATEST[place] = XlaGroup(CallComparison(membership, store, gloo), self._chip)
        return self._group

    def close(self) -> None:
        """Leave the group; the other ranks notice. May be called twice."""
        if self._group is not None:
            self._group.close()

    def kill(self, group: RawGroup) -> None:
        """Withdraw from a pending collective, on all ranks or on none. A collective on the chip cannot be stopped."""
        group.give_up()


@final
class XlaCommunicator(Communicator):
    """A communicator of the rank of one chip. The thread that waits for a collective launches it.

    Args:
        generation: The generation of the group.
        chip: Chip of this rank.
        backend: Has created the `XlaGroup` of the generation.
        ordinals: Number of each rank's chip.
    """

    checks_itself: Final = True

    def __init__(self, generation: Generation, chip: Chip, backend: XlaBackend, ordinals: Sequence[int]) -> None:
        self.membership = generation.membership
        self.timeout_s = generation.timeout_s
        self._chip = chip
        self._backend = backend
        self._ordinals = ordinals
        self._generation = generation

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # known once torch_xla is imported
        return self._chip.open().device

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        staged = stage_reduction(tensor, op, self.world_size)
        has_marks = op in (ReduceOp.MIN, ReduceOp.MAX) and staged.values.is_floating_point()
        sent = mark_nan(staged.values, op) if has_marks else staged.values

        def deliver(result: torch.Tensor) -> None:
            staged.values.copy_(put_nan_back(result) if has_marks else result)
            staged.deliver()

        return self._launch(ALL_REDUCE[op], tensor, lambda: self._chip.all_reduce(sent, op), deliver)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        check_root(root, self.membership.group, self.world_size)
        target, device = tensor.detach(), tensor.device
        # A sum of integers, zero on all other ranks: a floating-point sum would lose the sign of a zero. The conversion
        # runs on the host, as torch_xla's `view(dtype)` does, which crashes in several threads at once.
        whole = _BITS[target.dtype.itemsize]
        if self.rank == root and target.numel():
            part = target.cpu().reshape(-1).view(whole).to(device)
        else:
            part = torch.zeros(target.numel() * target.dtype.itemsize // whole.itemsize, dtype=whole, device=device)
        return self._launch(
            f"broadcast(root={root})",
            tensor,
            lambda: self._chip.all_reduce(part, ReduceOp.SUM),
            lambda result: _assign(target, result.cpu().view(target.dtype).reshape(target.shape)),
        )

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        target = tensor.detach().contiguous()

        def deliver(result: torch.Tensor) -> None:
            for output, ordinal in zip(outputs, self._ordinals, strict=True):
                _assign(output, result[ordinal])

        return self._launch("all_gather", tensor, lambda: self._chip.all_gather(target), deliver)

    def _launch(
        self,
        operation: str,
        shown: torch.Tensor,
        program: Callable[[], torch.Tensor],
        deliver: Callable[[torch.Tensor], None],
    ) -> Work:
        """Start a collective. Ranks compare dtype and shape of `shown`."""
        generation = self._generation
        call = f"{operation} of {describe_tensor(shown)}"
        results: list[torch.Tensor] = []
        launch = (lambda: results.append(program())) if shown.numel() else None
        work = cast(XlaOperation, generation.submit(operation, lambda group: group.add(call, launch)))

        def wait(timeout_s: float | None) -> None:
            work.group.settle()
            try:
                generation.wait(work, operation, timeout_s)
            except RaydistError as error:
                if timeout_s is None or not isinstance(error, DeadlineExceededError):
                    work.group.give_up()
                raise

        def finish() -> None:
            if results:
                deliver(results[0])

        return FinishingWork(wait, finish)

    def abort(self) -> None:
        self._generation.abort()

    def close(self) -> None:
        self._backend.close()
        self._generation.leave()


def _exchange_ordinals(generation: Generation, chip: Chip) -> list[int]:
    """Return the chip numbers of ranks, since libtpu numbers chips in its own order. Blocks.

    Raises:
        FailedPreconditionError: torch_xla is missing, or the slice does not have one chip per rank.
    """
    told = generation.exchange_on_host(str(chip.open().ordinal).encode(), "rendezvous of chips")
    ordinals, world_size = [int(each) for each in told], generation.membership.world_size
    if chip.num_chips != world_size or sorted(ordinals) != list(range(world_size)):
        raise FailedPreconditionError(
            f"Each of the {world_size} replicas must have one of the slice's chips, but torch_xla sees "
            f"{chip.num_chips} chips in all, and ranks have numbers {', '.join(map(str, ordinals))}. "
            "Name the topology and accelerator_version of the slice, and let TPUStrategy have all of it."
        )
    return ordinals


def _assign(target: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(values)


def mark_nan(values: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return a tensor for a MIN or MAX of `values`: the numbers, and marks for NaN.

    XLA's CPU device ignores NaN on all chips except the first.

    >>> mark_nan(torch.tensor([1.0, float("nan")]), ReduceOp.MAX).tolist()
    [[1.0, -inf], [0.0, 1.0]]
    """
    sign = 1 if op is ReduceOp.MAX else -1
    found = values.isnan()
    return torch.stack([values.masked_fill(found, -sign * math.inf), found.to(values.dtype) * sign])


def put_nan_back(reduced: torch.Tensor) -> torch.Tensor:
    """Return the reduction of the marked values, with NaN wherever any rank had NaN.

    >>> put_nan_back(mark_nan(torch.tensor([1.0, float("nan")]), ReduceOp.MIN)).tolist()
    [1.0, nan]
    """
    return reduced[0].masked_fill(reduced[1] != 0, math.nan)
