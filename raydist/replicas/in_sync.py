"""Periodic comparison of trained values between replicas, and aggregation of buffers that steps wrote."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.checked import all_equal, describe_call
from raydist.collectives.translation import describe_each, describe_odd_ones
from raydist.core.errors import CollectiveMismatchError
from raydist.core.values import ReduceOp
from raydist.mirroring.aggregation import aggregate, is_averaged, is_chosen_for, wide
from raydist.mirroring.messages import overwrite
from raydist.mirroring.object_kinds import digest_of, trained_state


@final
class WrittenBuffers:
    """The aggregation of written buffers over all replicas after each batch. Costs nothing without such buffers.

    Args:
        buffers: Returns the buffers with an aggregation, and the name of the aggregation of each.
        gather_all: Concatenates every replica's rows of a tensor; a collective of all replicas.
    """

    def __init__(
        self,
        buffers: Callable[[], list[tuple[torch.Tensor, str]]],
        gather_all: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._buffers = buffers
        self._gather_all = gather_all
        self._before: list[torch.Tensor] = []
        self.are_any = False  # True if there were such buffers when the current batch began

    def begin(self) -> None:
        """Begin a batch: record the values of the buffers, from which a sum computes what the batch added."""
        written = self._buffers()
        self._before = [buffer.detach().clone() for buffer, _ in written]
        self.are_any = bool(written)

    def agree(self, present: Sequence[bool]) -> None:
        """End a batch: set the buffers of every replica to the aggregate of all.

        Args:
            present: For each rank, True if the replica's values count.
        """
        if not self._before:
            return
        for (buffer, how), before in zip(self._buffers(), self._before, strict=True):
            rows = self._gather_all(buffer.detach().unsqueeze(0))
            values = [row for row, counts in zip(rows, present, strict=True) if counts]
            overwrite(buffer, _agreed(values, before, how))


def _agreed(values: list[torch.Tensor], before: torch.Tensor, how: str) -> torch.Tensor:
    """Aggregate the values. A sum adds up the changes to `before`, so that a batch without writes changes nothing.

    >>> _agreed([torch.tensor(11), torch.tensor(12)], torch.tensor(10), "sum")
    tensor(13)
    """
    if how != "sum" or len(values) == 1:
        return aggregate(values, how)
    held = wide(before)
    return aggregate([held, *(wide(value) - held for value in values)], "sum").to(before.dtype)


_log = logging.getLogger(__name__)

_LAST_BITS = 1e-5
_NOTHING = "nothing"
_OF_OWN_ROWS = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
    *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
)
"""Layers whose running statistics differ between replicas, as PyTorch documents."""


@final
class SyncCheck:
    """The comparison of one replica with its peers.

    Args:
        gather: Returns every replica's value of its argument, in rank order.
        objects: All mirrored objects, in an order that is the same on every replica.
    """

    def __init__(
        self, communicator: Communicator, gather: Callable[[Any], list[Any]], objects: Callable[[], Iterable[Any]]
    ) -> None:
        self._communicator = communicator
        self._gather = gather
        self._objects = objects
        self._warned = False
        self._warned_of_buffers = False

    def compare(self) -> None:
        """Check that all replicas hold the same parameters and the same optimizer state.

        If only last bits differ, all replicas take the values of replica 0, with one warning.

        Blocks until every replica calls this method, at most for the communicator's time limit.
        """
        objects = list(self._objects())
        if not objects:  # then no replica has any: the driver sends the same to all
            return
        entries = list(trained_state(objects))
        digests = [digest_of(value) for _, value in entries]
        total = 0
        for (name, _), digest in zip(entries, digests, strict=True):
            total = zlib.crc32(digest.to_bytes(4), zlib.crc32(name.encode(), total))
        call = describe_call("comparison of what was trained", None)
        if not all_equal(self._communicator, call, (len(entries), total)):
            self._settle(entries, digests)
        self.compare_buffers()

    def compare_buffers(self) -> None:
        """Warn once if replicas differ in a buffer that is neither torch's own nor declared by `rd.set_aggregation`.

        Each replica computed such a buffer from its own rows, so a module that uses it trains differently than on one
        device. The documentation of torch's own layers with running statistics says so.

        Blocks until every replica calls this method, at most for the communicator's time limit.
        """
        buffers = [] if self._warned_of_buffers else list(_undeclared_buffers(self._objects()))
        if not buffers:
            return
        digests = [digest_of(buffer) for _, buffer in buffers]
        call = describe_call("comparison of buffers", None)
        total = zlib.crc32(repr(digests).encode())
        if all_equal(self._communicator, call, (len(buffers), total)):
            return
        self._warned_of_buffers = True
        said = self._gather(digests)
        if self._communicator.rank == 0:
            rows = zip(buffers, zip(*said, strict=False), strict=False)
            names = [name for (name, _), row in rows if len(set(row)) > 1]
            _log.warning(
                "Replicas differ in the buffer %s: each computed it from its own rows, so training may differ from one "
                "device's. Compute it from the rows of all replicas, by rd.get_replica_context().all_reduce, or say "
                "with rd.set_aggregation what it is.",
                ", ".join(names[:5]) or "of some module",
            )

    def _settle(self, entries: Sequence[tuple[str, Any]], digests: Sequence[int]) -> None:
        named = zip(entries, digests, strict=True)
        said = self._gather([(name, _kind(value), digest) for (name, value), digest in named])
        kinds = [[(name, kind) for name, kind, _ in theirs] for theirs in said]
        if any(theirs != kinds[0] for theirs in kinds):
            raise _other_kinds(kinds)
        rows = enumerate(zip(*said, strict=True))
        different = [place for place, row in rows if len({digest for *_, digest in row}) > 1]
        for place in different:
            name, value = entries[place]
            self._take_last_bits(name, value, [theirs[place][2] for theirs in said])
        if not self._warned:
            self._warned = True
            _log.warning(
                "The last bits of %s differed between replicas, and are replica 0's now. Some operation of the step "
                "adds up in another order each time; RunOptions(param_sync_every=) says how often they are compared.",
                entries[different[0]][0],
            )

    def _take_last_bits(self, name: str, value: Any, digests: Sequence[int]) -> None:
        apart = torch.inf
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_sparse:
            apart = self._distance(value)
        if not apart <= _LAST_BITS:
            shown = "" if apart == torch.inf else f" (by {apart:.2g} of the largest value)"
            raise CollectiveMismatchError(
                f"All replicas must train the same values, but {name} differs{shown} between them"
                f"{describe_odd_ones(dict(enumerate(digests)))}. Look for an optimizer step, a write or a setting that "
                "only some replicas make."
            )

    def _distance(self, value: torch.Tensor) -> float:
        """Return the largest difference relative to replica 0's largest value; copy replica 0's value if it is tiny."""
        first = value.detach().clone()
        self._communicator.broadcast(first, 0).wait()
        most = (value.detach() - first).abs().max().double() / first.abs().max().double().clamp(min=1e-30)
        # `compare` accepts NaN on all replicas; NaN on some is a difference that a maximum would hide.
        most = torch.where(torch.isnan(most), torch.inf, most).reshape(1)
        self._communicator.all_reduce(most, ReduceOp.MAX).wait()
        if most.item() <= _LAST_BITS:
            value.detach().copy_(first)
        return float(most.item())


def _undeclared_buffers(objects: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each buffer that may hold statistics, in the order of `objects`."""
    for module in objects:
        if isinstance(module, torch.nn.Module) and not isinstance(module, _OF_OWN_ROWS) and not is_chosen_for(module):
            for name, buffer in module.named_buffers(recurse=False):
                if is_averaged(buffer):
                    yield f"{type(module).__name__}.{name}", buffer


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "a setting"


def _other_kinds(kinds: Sequence[Sequence[tuple[str, str]]]) -> CollectiveMismatchError:
    """Return the error for replicas that hold different kinds of objects."""
    longest = max(len(theirs) for theirs in kinds)
    padded = [[*theirs, *[(_NOTHING, _NOTHING)] * (longest - len(theirs))] for theirs in kinds]
    row = next(row for row in zip(*padded, strict=True) if len(set(row)) > 1)
    listed = describe_each([f"{name} ({kind})" for name, kind in row], "replica")
    return CollectiveMismatchError(
        f"All replicas must hold the same parameters and the same state of optimizers, got {listed}. Look for an "
        "optimizer step that only some replicas make, or for parameters that only some put into other places."
    )
