"""How checkpoints reach what replicas hold: the driver's end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch

from raydist.checkpoints.sharing.dispatched_save import DispatchedSave
from raydist.checkpoints.sharing.share_writer import begin_share
from raydist.checkpoints.sharing.shares import ShareRequest
from raydist.mirroring.driver import MirrorDriver
from raydist.replicas.rules import ReplicaRules
from raydist.replicas.step import ReplicaSetup

__all__ = ["SAVES", "ReplicaSaver"]


@final
class _Saves:
    """Stands for the `ShareWriter` that each replica has."""


SAVES: Any = _Saves()


@final
class ReplicaSaver:
    """A `ShareSaver` of a strategy whose replicas run in lock step.

    Args:
        mirror: The driver's objects.
        setups: The replicas, once it is planned what they are.
        dispatch: Has replicas run a function of their `ShareWriter` after all steps before; given that function, the
            save's token and the function's other arguments.
        nodes: Ids of the nodes that replicas are on.
    """

    def __init__(
        self,
        mirror: MirrorDriver,
        setups: Callable[[], Sequence[ReplicaSetup]],
        dispatch: Callable[..., DispatchedSave],
        nodes: Callable[[], Collection[str]],
    ) -> None:
        self._mirror = mirror
        self._setups = setups
        self._dispatch = dispatch
        self._nodes = nodes

    def how(self, obj: Any) -> Literal["divided", "whole"]:
        """See `ShareSaver`."""
        # Rules of one's own may let replicas differ: of these the driver reads the first one, too.
        return self._mirror.how_saved(obj) if self._have_one_rule() else "whole"

    def are_alike(self) -> bool:
        """Whether what is in the memory of a replica is in that of all others as well."""
        # A TPU's tensors are read by all of its replicas together.
        return self._have_one_rule() and {torch.device(each.device).type for each in self._setups()} <= {"cpu", "cuda"}

    def _have_one_rule(self) -> bool:
        return all(type(setup.rules) is ReplicaRules for setup in self._setups())

    def begin(
        self, request: ShareRequest, objects: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]
    ) -> DispatchedSave:
        """See `ShareSaver`."""
        told = replace(request, alone=self._mirror.items_alone(objects))
        return self._dispatch(begin_share, told.token, told, dict(objects), dict(modules))

    def nodes(self) -> Collection[str]:
        """See `ShareSaver`."""
        return self._nodes()
