"""The lifetime of this process's connection to Ray, also in forked children, and the state of nodes."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, final

import ray

from raydist.compat.ray_internals import global_state, global_worker, own_node, without_ray_excepthook
from raydist.core.errors import UnavailableError
from raydist.core.fork_guard import never_free


@final
class RaySession:
    """The connection of this process to Ray, from `ray.init` to `ray.shutdown`: what it started ends with it.

    Most calls of Ray after a shutdown start another Ray, so callers check this object first.
    """

    def __init__(self) -> None:
        node = own_node()  # every ray.init makes a new one
        self._node: Callable[[], Any] = weakref.ref(node) if ray.is_initialized() else _no_node

    @property
    def is_open(self) -> bool:
        """True while the connection is open. Costs 0.3 us."""
        node = self._node()
        return node is not None and node is own_node() and ray.is_initialized()

    def require(self, what: str) -> None:
        """Raise UnavailableError if Ray was shut down since."""
        if not self.is_open:
            raise UnavailableError(
                f"{what} needs the Ray that it was started with, and that was shut down (ray.shutdown()). Keep Ray "
                "until it is closed, or make a new one.",
                actor=what,
            )


def _no_node() -> None:
    return None


def _leave_ray_to_the_parent() -> None:
    """Detach a forked child from Ray: its exit must neither wait for the parent's threads nor end the parent's Ray.

    Ray registers an exception hook and a shutdown at exit.
    """
    if not ray.is_initialized():
        return
    atexit.unregister(ray.shutdown)
    without_ray_excepthook()
    for kept in (*vars(global_state()).values(), *vars(global_worker()).values()):
        never_free(kept)
    system = ctypes.CDLL(None)
    if hasattr(system, "on_exit"):  # the last registered function runs first: before C++ destructors, which would hang
        system.on_exit(ctypes.cast(system._exit, ctypes.c_void_p), None)


os.register_at_fork(after_in_child=_leave_ray_to_the_parent)


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
