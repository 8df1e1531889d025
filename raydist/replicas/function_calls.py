"""Calls of step functions: each as a replica of its group, with what holds around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from raydist.context.current import enter_replica
from raydist.context.replica_context import ReplicaContext
from raydist.mirroring.on_replica.replica import MirrorReplica
from raydist.owning_process import call_here
from raydist.replicas.accelerator import Accelerator
from raydist.replicas.connected import Connected
from raydist.replicas.replica_view import ReplicaView
from raydist.replicas.results import StepResult, pack_result
from raydist.replicas.step import StepHeader
from raydist.summaries.step_recorder import StepRecorder

__all__ = ["FunctionCalls"]


@final
class FunctionCalls:
    """Those of one replica.

    What is the same for all steps is made once: where 64 processes share two cores, a call of Python is 3 us.

    Args:
        mirror: The replica's variables.
        accelerator: Its device.
        limit_s: How long a step may wait for other threads of its process that want other settings of torch.
    """

    def __init__(self, mirror: MirrorReplica, accelerator: Accelerator, limit_s: float) -> None:
        self._mirror = mirror
        self._guard = mirror.guard()
        self._accelerator = accelerator
        self._limit_s = limit_s
        self._peers: Connected | None = None
        self._recorder = StepRecorder(lambda: None if self._peers is None else self._peers.share)
        self._inside: AbstractContextManager[None] = contextlib.nullcontext()  # once there are peers

    def join(self, view: ReplicaView, peers: Connected) -> None:
        """Functions are called as this replica of this group from now on."""
        self._peers = peers
        self._inside = enter_replica(ReplicaContext(view, peers), self._recorder.recording())

    def call(
        self,
        header: StepHeader,
        peers: Connected,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """What the step function returns."""
        with (
            peers.run(
                header.rows,
                header.gradient_reduce_op,
                stand_in=header.stand_in,
                check_in_sync=header.check_in_sync,
                on_nonfinite=header.on_nonfinite,
            ),
            self._inside,
        ):
            self._guard.is_on = True
            try:
                if header.modes is None and header.summaries is None and not self._accelerator.defers:
                    value = call_here(fn, *args, **kwargs)
                else:
                    with self._around(header):
                        value = call_here(fn, *args, **kwargs)
                self._mirror.after_run()
            finally:
                self._guard.is_on = False
        return value

    def _around(self, header: StepHeader) -> AbstractContextManager[Any]:
        """Where the driver had set more than most do, or the device is more than most are."""
        around = contextlib.ExitStack()
        if header.summaries is not None:
            around.enter_context(self._recorder.following(header.summaries))
        if header.modes is not None or self._accelerator.defers:
            around.enter_context(self._accelerator.working(header.modes, self._limit_s))
        return around

    def pack(self, value: Any, header: StepHeader, peers: Connected) -> StepResult:
        """What a call returned, fit to travel."""
        # A loop over batches of its own returns what all of them gave, also where its last batch had no rows here.
        absent = header.rows is not None and header.stands_in(peers.rank)
        return pack_result(value, absent=absent, rows=peers.num_rows_seen, summaries=self._recorder.take_records())

    def drop_records(self) -> None:
        """The step has failed: nobody is to see what it recorded."""
        self._recorder.drop_records()
