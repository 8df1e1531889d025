"""What the driver half of mirroring may ask of the replica half, and the port through which it asks.

The driver half names a call by the method itself: `link.call(0, MirrorCalls.buffer_images, handles)`. So a type checker
sees arguments and results on both sides. What travels is that method; its name is looked up once, where a replica
answers.
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
    """The replica half, as far as the driver half may call it between steps."""

    @abstractmethod
    def collect_control(self, modules: bool) -> bytes:
        """Pickle of the control state that changed since the driver last heard of it.

        Args:
            modules: Modules and `requires_grad`; False: everything else (the modules would be slower to look at).
        """

    @abstractmethod
    def collect_tensors(self, handles: Sequence[int] | None = None) -> dict[int, TensorImage]:
        """All other tensors whose values changed since the driver last heard of them, or those among the given ones."""

    @abstractmethod
    def collect_gradients(self) -> dict[int, TensorImage]:
        """The gradients of all parameters that have one."""

    @abstractmethod
    def changed_gathered(self) -> list[int]:
        """Handles of buffers that are read from all replicas and changed on this one since the last question."""

    @abstractmethod
    def buffer_images(self, handles: Sequence[int]) -> list[TensorImage]:
        """Present values of these tensors."""

    @abstractmethod
    def collect_optimizer_state(self, handle: int) -> bytes:
        """Pickle of an optimizer's `state`: momentum and its like."""

    @abstractmethod
    def collect_metrics(self) -> bytes:
        """Pickle of the states of every metric by handle."""

    @abstractmethod
    def pull_rows(self, handle: int, rows: torch.Tensor) -> torch.Tensor:
        """Present values of these rows of an embedding table."""

    @abstractmethod
    def export_rows(self, handle: int) -> list[dict[str, Any]]:
        """All rows of an embedding table; see `RowAccess`."""

    @abstractmethod
    def import_rows(self, handle: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace all rows of an embedding table; see `RowAccess`."""

    @abstractmethod
    def dump(self) -> tuple[bytes, frozenset[int]]:
        """Everything this replica holds, and its handles, for the `load` of others."""

    @abstractmethod
    def load(self, state: bytes) -> None:
        """Become what another replica was when it called `dump`, but for what each gathers from its own rows.

        Running statistics and states of metrics stay as they are here. Where this replica has none yet, those of
        metrics are such that together with the other's they merge to the other's.
        """


class ReplicaLink(Protocol):
    """How the driver half reaches the replicas, ranks 0, 1, ..."""

    def call(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """The result of a method of one replica, after all dispatched steps; raises the error of one that failed."""

    def call_all(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        """The results of a method of every replica in rank order, after all dispatched steps."""


def answer(replica: MirrorCalls, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
    """What `replica` answers to a call: the end of every link.

    Raises:
        FailedPreconditionError: `method` is none of :class:`MirrorCalls`.
    """
    if getattr(MirrorCalls, method.__name__, None) is not method:
        raise FailedPreconditionError(
            f"raydist bug: a replica answers the methods of MirrorCalls only, got {method!r}."
        )
    found: Any = getattr(replica, method.__name__)
    result: _T = found(*args)
    return result
