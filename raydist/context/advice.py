"""What to say to errors of a step whose own messages lead the wrong way."""

from __future__ import annotations

from raydist.foreign_errors import annotate, message_of

__all__ = ["advise"]


def advise(error: BaseException) -> None:
    """Add a note to an error that a step raised, if there is something to do that it does not say.

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
