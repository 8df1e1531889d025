"""Processes that find torch and the package imported: by themselves they take 2 s of a core for that, each."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

__all__ = ["fork_server"]


def fork_server() -> ForkServerContext:
    """Start of processes: as forks of a process that did nothing else, so that they hold nothing of a test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "raydist.collectives.opening"])
    return context
