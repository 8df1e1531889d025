"""Replacing lost parameter servers: all servers go back to the last checkpoint, and training continues from there.

1. All servers and workers are killed, so that no request of before reaches a server of afterwards. Other processes
   start in their bundles; Ray moves bundles of a lost node to another one.
2. A worker follows the driver's log, and creates all variables, tables and optimizers on the servers.
3. Every server reads its part of the checkpoint. Then all take the values.

The coordinator sends the closures that had not ended afterwards.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import final

from raydist.checkpoints.ps_recovery import LastCheckpoint, find_last_checkpoint
from raydist.coordinator.checkpointing import await_restored
from raydist.coordinator.coordinator import Coordinator
from raydist.coordinator.ps_servers import PsServers
from raydist.core.errors import FailedPreconditionError, UnavailableError
from raydist.core.exception_utils import annotate, describe, message_of
from raydist.mirroring.driver import MirrorDriver
from raydist.options import FailureOptions, Timeouts
from raydist.replicas.ps.worker_runner import WorkerRunner

_log = logging.getLogger("raydist")
_ANSWER_S = 3.0


@final
class ServerRecovery:
    """The recovery of one strategy's servers (a `RecoversServers`). Used by the coordinator's thread.

    Args:
        mirror: The strategy's objects. The thread may outlive the strategy, and must not keep it alive.
        told: Called with the duration of each recovery, in seconds.
    """

    def __init__(
        self,
        side: PsServers,
        mirror: weakref.ref[MirrorDriver],
        options: FailureOptions,
        timeouts: Timeouts,
        told: Callable[[float], None],
    ) -> None:
        self._side = side
        self._mirror = mirror
        self._options = options
        self._timeouts = timeouts
        self._told = told
        self._losses: list[float] = []  # times of losses
        self._given_up = False

    def is_loss(self, error: Exception) -> bool:
        return not self._given_up and isinstance(error, UnavailableError) and error.actor in self._side.names

    def recover(self, error: Exception, coordinator: Coordinator) -> tuple[int, ...]:
        """Implement `RecoversServers.recover`.

        Blocks while the new processes start, at most `FailureOptions.replace_s` for the servers, and for the restore.
        """
        began, first = time.monotonic(), error
        reasons: dict[str, None] = {}
        tried: LastCheckpoint | None = None
        while True:
            try:
                self._require_allowed()
                last = self._find()
            except Exception as why:
                raise self._refused(first, why, restarted=tried is not None) from None
            if tried is not None and not self.is_loss(error) and last.path == tried.path:
                raise self._refused(first, error, restarted=True) from None
            reasons.update(dict.fromkeys(self._side.lost(_ANSWER_S)))
            tried = last
            try:
                versions = self._restore(last, coordinator)
            except Exception as another:  # another server is gone, or a newer checkpoint has replaced this one
                error = another
            else:
                break
        seconds = time.monotonic() - began
        self._told(seconds)
        _log.warning(
            "%s. Started again in %.1f s, all servers with the values of %s, saved %.0f s before. Updates since then "
            "are lost, and what only workers had. Closures that had not ended run again.",
            "; ".join(reasons) or describe(first),
            seconds,
            last.path,
            time.time() - seconds - last.saved_at,
        )
        return versions

    def _find(self) -> LastCheckpoint:
        mirror = self._mirror()
        if mirror is None:
            raise FailedPreconditionError("the strategy is gone")
        return find_last_checkpoint(mirror.handle_of)

    def _restore(self, last: LastCheckpoint, coordinator: Coordinator) -> tuple[int, ...]:
        coordinator.stop_workers()
        self._side.restart(self._options.replace_s)
        coordinator.start_workers()
        coordinator.ask_any(WorkerRunner.restore_servers.__name__, last.restore, within_s=self._timeouts.start_s)
        token = last.restore.request.token
        if not all(shard.sees_files for shard in await_restored(self._side, token, self._timeouts.step_s)):
            raise FailedPreconditionError(f"a parameter server does not see the files of {last.path}")
        versions = self._side.commit_restore(token)
        if (mirror := self._mirror()) is not None:
            mirror.expire()
        return versions

    def _require_allowed(self) -> None:
        now, options = time.monotonic(), self._options
        self._losses = [at for at in self._losses if now - at < options.within_s] + [now]
        if len(self._losses) > options.max_failures:
            raise FailedPreconditionError(
                f"servers were lost {len(self._losses)} times within {options.within_s:g} s "
                "(FailureOptions.max_failures)"
            )

    def _refused(self, error: Exception, why: Exception, *, restarted: bool) -> Exception:
        """Return the error that the program gets. Servers that are not restored must not answer."""
        if restarted:
            self._given_up = True
            self._side.kill()
        reason = message_of(why) if isinstance(why, FailedPreconditionError) else describe(why)
        annotate(error, f"The servers did not go back to a checkpoint: {reason.rstrip('.')}.")
        return error
