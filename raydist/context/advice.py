"""Notes for errors of a step whose own messages are misleading."""

from __future__ import annotations

from raydist.foreign_errors import annotate, message_of

__all__ = ["advise"]


def advise(error: BaseException) -> None:
    """Add a note to an error of a step, if raydist knows a remedy that the message does not name.

    >>> error = ValueError("Default process group has not been initialized, please make sure to call it.")
    >>> advise(error)
    >>> error.__notes__[0][:66]
    'Replicas meet in groups of their own, torch.distributed has none: '
    """
    if "process group has not been initialized" in message_of(error):
        annotate(
            error,
            "Replicas meet in groups of their own, torch.distributed has none: use rd.get_replica_context().all_reduce "
            "or all_gather. Gradients are reduced without any call (no DistributedDataParallel around the "
            "model). A process group that a step wants to have besides, it must open itself.",
        )
