"""Which nodes of the cluster are about to go away."""

from __future__ import annotations

import contextlib

import ray

from raydist.compat.ray_internals import global_state

__all__ = ["draining_nodes", "this_node"]


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that are being drained; none where this process has no Ray. Any thread may ask."""
    with contextlib.suppress(Exception):  # Ray may be shut down meanwhile, or its head be gone: nothing is known then
        if ray.is_initialized():
            return frozenset(global_state().get_draining_nodes())
    return frozenset()


def this_node() -> str:
    """The id of this process's node; empty where it has no Ray."""
    with contextlib.suppress(Exception):
        if ray.is_initialized():
            return str(ray.get_runtime_context().get_node_id())
    return ""
