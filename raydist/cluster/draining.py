"""Nodes of the cluster that are being drained."""

from __future__ import annotations

import contextlib

import ray

from raydist.compat.ray_internals import global_state


def draining_nodes() -> frozenset[str]:
    """Return the ids of nodes that are being drained; none without Ray. Thread-safe."""
    with contextlib.suppress(Exception):  # Ray may be shutting down, or its head may be gone: nothing is known then
        if ray.is_initialized():
            return frozenset(global_state().get_draining_nodes())
    return frozenset()


def this_node() -> str:
    """Return the id of this process's node; empty without Ray."""
    with contextlib.suppress(Exception):
        if ray.is_initialized():
            return str(ray.get_runtime_context().get_node_id())
    return ""
