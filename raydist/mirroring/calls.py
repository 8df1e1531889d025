"""The remote calls from the driver side of mirroring to the replicas, and the interface that makes them.

The driver names a call by the method: `link.call(0, MirrorCalls.tensor_images, handles)`, so that a type checker sees
arguments and results on both sides. The method itself is sent; the replica looks its name up on its own object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, TypeVarTuple

import torch

from raydist.errors import FailedPreconditionError
from raydist.mirroring.shipment import TensorImage

__all__ = ["MirrorCalls", "ReplicaLink", "answer"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class MirrorCalls(ABC):
    """The methods of a replica that the driver may call between steps."""

    @abstractmethod
    def collect_control(self, modules: bool) -> bytes:
        """Return the pickled control state that changed since the last call.

        Args:
            modules: True for modules and `requires_grad`, False for all other objects (modules take longer to compare).
        """

    @abstractmethod
    def tensor_images(self, handles: Sequence[int]) -> dict[int, TensorImage]:
        """Return the present values of these parameters and buffers, except of those that this replica does not have."""

    @abstractmethod
    def collect_gradients(self) -> dict[int, TensorImage]:
        """Return the gradients of all parameters that have one."""

    @abstractmethod
    def collect_optimizer_state(self, handle: int) -> bytes:
        """Return the pickled `state` of an optimizer (momentum and similar)."""

    @abstractmethod
    def collect_metrics(self) -> bytes:
        """Return the pickled states of all metrics by handle."""

    @abstractmethod
    def pull_rows(self, handle: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the present values of these rows of an embedding table."""

    @abstractmethod
    def export_rows(self, handle: int) -> list[dict[str, Any]]:
        """Return all rows of an embedding table; see `RowAccess`."""

    @abstractmethod
    def import_rows(self, handle: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace all rows of an embedding table; see `RowAccess`."""

    @abstractmethod
    def dump(self) -> tuple[bytes, frozenset[int]]:
        """Return the pickled state of this replica, to be given to `load` of others, and the handles in it."""

    @abstractmethod
    def load(self, state: bytes) -> None:
        """Load the state that another replica returned from `dump`, except the state that each replica gathers itself.

        Running statistics and metric states of this replica stay. A metric that is new to this replica gets states that
        merge with the states of the other replica to exactly the latter.
        """


class ReplicaLink(Protocol):
    """The interface by which the driver calls the replicas, ranks 0, 1, ..."""

    def call(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """Call a method of one replica after all dispatched steps; raise the error of a step that failed. Blocks."""

    def call_all(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        """Call a method of every replica after all dispatched steps; return the results in rank order. Blocks."""


def answer(replica: MirrorCalls, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
    """Call the method of `replica` that overrides `method`: the receiving end of a link.

    Raises:
        FailedPreconditionError: `method` is not a method of :class:`MirrorCalls`.
    """
    if getattr(MirrorCalls, method.__name__, None) is not method:
        raise FailedPreconditionError(
            f"raydist bug: a replica answers the methods of MirrorCalls only, got {method!r}."
        )
    found: Any = getattr(replica, method.__name__)
    result: _T = found(*args)
    return result
