"""The driver's end of saving and restoring the objects that replicas hold."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import nn

from raydist.actors.portable_errors import PortableError
from raydist.actors.supervision import root_cause
from raydist.checkpoints.sharing.dispatched_save import DispatchedSave
from raydist.checkpoints.sharing.restore_request import PreparedShare, RestoreRequest
from raydist.checkpoints.sharing.share_reader import commit_share, discard_share, prepare_share
from raydist.checkpoints.sharing.share_writer import begin_share
from raydist.checkpoints.sharing.shares import ShareRequest
from raydist.errors import FailedPreconditionError
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.parts import has_load_hooks
from raydist.parameter_servers.rows.saved_rows import SavedRows
from raydist.replicas.rules import ReplicaRules
from raydist.replicas.step import ReplicaSetup

__all__ = ["RESTORES", "ReplicaRestorer", "ReplicaSaver", "SAVES"]


@final
class _Restores:
    """Stands for the `ShareReader` that each replica has."""


RESTORES: Any = _Restores()


@final
class ReplicaRestorer:
    """A `ShareRestorer` of a strategy whose replicas run in lock step.

    Args:
        mirror: The driver's objects.
        are_alike: Whether all replicas hold the same, in memory that is their own.
        ask: Has replicas run a function of their `ShareReader` after all steps before, and waits; given that function
            and its other arguments.
    """

    def __init__(
        self, mirror: MirrorDriver, are_alike: Callable[[], bool], ask: Callable[..., Sequence[bytes]]
    ) -> None:
        self._mirror = mirror
        self._are_alike = are_alike
        self._ask = ask

    def holds(self, obj: Any) -> bool:
        """See `ShareRestorer`."""
        return not isinstance(obj, SavedRows) and self._mirror.holds(obj)

    def can_restore(self, obj: Any) -> bool:
        """See `ShareRestorer`. What replicas count apart, and what calls back into the program, stays here."""
        return self.holds(obj) and not self._mirror.has_metrics(obj) and not has_load_hooks(obj) and self._are_alike()

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Sequence[PreparedShare] | None:
        """See `ShareRestorer`."""
        are_new = not all(map(self._mirror.is_mirrored, (*objects.values(), *modules.values())))
        try:
            answers = self._ask(prepare_share, request, dict(objects), dict(modules))
        except FailedPreconditionError:
            if are_new:  # a step will say why they cannot be sent
                return None
            raise
        try:
            return _results(answers)
        except BaseException:
            with contextlib.suppress(Exception):  # its own error is what must be seen
                self.discard()
            raise

    def commit(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """See `ShareRestorer`."""
        _results(self._ask(commit_share, token, dict(objects), dict(modules)))

    def discard(self) -> None:
        """See `ShareRestorer`."""
        self._ask(discard_share)


def _results(answers: Sequence[bytes]) -> list[Any]:
    """What replicas have returned; raises what one has raised."""
    found = [pickle.loads(each) for each in answers]
    errors = [each.restore() for each in found if isinstance(each, PortableError)]
    if errors:
        raise root_cause(errors)
    return found


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
