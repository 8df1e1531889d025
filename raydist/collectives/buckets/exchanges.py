"""One exchange after another: in the layout that all ranks agreed on, in memory that is kept from pass to pass.

Sizes that differ between ranks do not raise: gloo ends the process, NCCL hangs. So the first collective of every pass
has a size that is known to be equal: the first bucket of the layout that was agreed on before, which also tells where a
rank wants another one. Only then, and where there is no bucket yet, fingerprints of layouts are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch

from raydist.collectives.base import Communicator, Work
from raydist.collectives.buckets.agreement import BACKWARD_ADVICE, Agreement
from raydist.collectives.buckets.buffer import BucketBuffer
from raydist.collectives.buckets.exchange import AnyBuffer, BucketExchange, make_buffers
from raydist.collectives.buckets.forms import StepWeight
from raydist.collectives.buckets.layout import BucketLayout, ParameterSpec, plan_buckets
from raydist.collectives.buckets.lazy_buffer import LazyBuffer
from raydist.collectives.buckets.sparse_lane import SparseLane
from raydist.collectives.buckets.tail import PassStamp
from raydist.errors import FailedPreconditionError
from raydist.values import ReduceOp

__all__ = ["Exchanges"]

_Buffers = tuple[AnyBuffer, ...]


@final
class Exchanges:
    """The exchanges of one rank.

    Args:
        communicator: Carries them.
        bucket_bytes: Gradients that travel together.
        first_bucket_bytes: Those that travel first.
        compression: What float32 gradients travel as; None for what they are.
        expect_rows: Identities of parameters whose gradients will be sparse.

    Attributes:
        layout: What all ranks agree on.
        sent: The only bucket, where it has been sent without an exchange; None once all has gone well.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        compression: torch.dtype | None = None,
        expect_rows: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._expect_rows = expect_rows
        self.layout = BucketLayout(())
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._compression = compression
        self._trained: tuple[int, ...] = ()
        self._specs: dict[int, ParameterSpec] = {}
        self._seen: dict[int, None] | None = None
        self._sparse: frozenset[int] = frozenset()
        self._buffers: _Buffers = ()
        self._spare: _Buffers = ()
        self._last: BucketExchange | None = None
        self.sent: Work | None = None

    def open(
        self,
        trained: tuple[int, ...],
        parameters: Mapping[int, torch.nn.Parameter],
        stamp: PassStamp,
        weight: StepWeight,
        *,
        kept: Sequence[torch.Tensor],
        held: Collection[int],
        reduced: bool = False,
    ) -> BucketExchange:
        """Begin a pass.

        Args:
            trained: Numbers of the trained parameters.
            parameters: All parameters, by number.
            stamp: Which pass this is.
            weight: What becomes of this rank's gradients on the way.
            kept: What `.grad` held before: where it is memory of ours, it moves out.
            held: Parameters whose buckets must wait for the end of the pass.
            reduced: Go on with the pass that has `sent` its only bucket, if it has.

        Blocking: after a change of what is trained, until all ranks have begun the pass.

        Raises:
            CollectiveMismatchError: Ranks train different parameters or are in different passes.
        """
        sent = self._drain()
        if trained != self._trained or not self.layout.buckets:
            self._change(trained, parameters, stamp, weight, kept)
        buffers = self._free_buffers(kept)
        lane = self._lane(weight) if self._sparse else None
        self._last = BucketExchange(self._communicator, self.layout, buffers, stamp, weight, held=held, lane=lane)
        if reduced and sent is not None:
            self._last.take_over(sent)
        return self._last

    def _drain(self) -> Work | None:
        """Wait for what an error left behind; what was sent without an exchange."""
        last, sent = self._last, self.sent
        if last is not None:
            last.drain()
        if sent is not None:
            sent.wait()
        self._last = self.sent = None
        return sent

    def only_buffer(self, trained: tuple[int, ...]) -> BucketBuffer | None:
        """That of all trained parameters, where there is one for all and nobody sees its memory."""
        buffers = self._buffers
        if len(buffers) != 1 or trained != self._trained or self._sparse or self._last is not None or self.sent:
            return None
        buffer = buffers[0]
        return None if isinstance(buffer, LazyBuffer) or buffer.num_lent else buffer

    def _lane(self, weight: StepWeight) -> SparseLane:
        specs = [self._specs[index] for index in self._trained if index in self._sparse]
        return SparseLane(
            self._communicator, specs, scale=weight.scale, counts=weight.counts, compression=self._compression
        )

    @property
    def receiver(self) -> Callable[[int, torch.Tensor], None]:
        """What takes the gradients of the pass that has been opened."""
        if self._last is None:
            raise FailedPreconditionError("raydist bug: gradients must come in an open pass, and there is none.")
        return self._last.put if self._seen is None else functools.partial(self._note, self._last, self._seen)

    @staticmethod
    def _note(exchange: BucketExchange, seen: dict[int, None], index: int, gradient: torch.Tensor) -> None:
        """The order of the first pass is what buckets are laid out in."""
        seen.pop(index, None)
        seen[index] = None
        exchange.put(index, gradient)

    def done(self) -> None:
        """The pass has ended well. The first one in a layout of several buckets agrees on a better one.

        A parameter whose gradient was sparse on some rank leaves the buckets: from then on its rows travel.

        Blocking: then, until all ranks are there.
        """
        last, self._last = self._last, None
        seen, self._seen = self._seen, None
        new = frozenset() if last is None else last.became_sparse
        self._sparse |= new
        if seen is not None:
            self._reorder(list(seen))
        elif new:
            order = [slot.spec for bucket in self.layout.buckets for slot in bucket.slots]
            self._take(self._plan(order[::-1]))

    def _change(
        self,
        trained: tuple[int, ...],
        parameters: Mapping[int, torch.nn.Parameter],
        stamp: PassStamp,
        weight: StepWeight,
        kept: Sequence[torch.Tensor],
    ) -> None:
        if self.layout.buckets:
            self._tell_change(replace(stamp, relayout=True), kept)
        specs = {index: ParameterSpec.of(index, parameters[index]) for index in trained}
        expected = self._expect_rows()
        self._sparse |= {  # XLA has no sparse tensors
            index for index in trained if id(parameters[index]) in expected and specs[index].device.type != "xla"
        }
        layout = self._plan(list(specs.values()))
        numbers = {
            "step": stamp.step,
            "backward pass": stamp.backward,
            "trained parameters": len(trained),
            "layout of trained parameters": layout.fingerprint,
        }
        group = self._communicator
        Agreement(group, "the backward pass", numbers, group.device, advice=BACKWARD_ADVICE).wait()
        self._specs = specs
        self._trained = trained
        if layout != self.layout:
            self._take(layout)
            self._seen = {} if len(layout.buckets) > 1 else None

    def _tell_change(self, stamp: PassStamp, kept: Sequence[torch.Tensor]) -> None:
        first = self._free_buffers(kept)[0]
        first.tail.write(stamp.encode(), late=False, details=None)
        self._communicator.all_reduce(first.flat, ReduceOp.SUM).wait()
        first.tail.read()

    def _reorder(self, seen: list[int]) -> None:
        """Lay out in the order that rank 0 saw gradients appear in; those it did not see come last."""
        unseen = [index for index in reversed(self._trained) if index not in set(seen)]
        order = torch.tensor([*seen, *unseen], device=self._communicator.device)
        self._communicator.broadcast(order, 0).wait()
        layout = self._plan([self._specs[index] for index in reversed(order.tolist())])
        if layout != self.layout:
            self._take(layout)

    def _plan(self, specs: Sequence[ParameterSpec]) -> BucketLayout:
        return plan_buckets(
            [spec for spec in specs if spec.index not in self._sparse],
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._first_bucket_bytes,
            compression=self._compression,
        )

    def _take(self, layout: BucketLayout) -> None:
        """All ranks do this at the same time: their memory may be shared."""
        group = self._communicator
        sizes = [(BucketBuffer.numel(bucket, group.world_size), bucket.wire) for bucket in layout.buckets]
        self._buffers = self._spare = ()
        flats = group.allocate(sizes)
        placed = [flat.to(bucket.device) for flat, bucket in zip(flats, layout.buckets, strict=True)]
        self._buffers = make_buffers(layout, placed, group)
        self.layout = layout

    def _free_buffers(self, kept: Sequence[torch.Tensor]) -> _Buffers:
        """Buffers that nobody sees any more: the group's own, or others where somebody holds on to gradients."""
        if _free(self._buffers):
            return self._buffers
        for buffer in self._buffers:
            if buffer.num_lent and kept:
                buffer.take_back(kept)
        if _free(self._buffers):
            return self._buffers
        if not self._spare or not _free(self._spare):
            flats = [torch.empty_like(buffer.flat) for buffer in self._buffers]
            self._spare = make_buffers(self.layout, flats, self._communicator)
        return self._spare


def _free(buffers: _Buffers) -> bool:
    return not any(buffer.num_lent for buffer in buffers)
