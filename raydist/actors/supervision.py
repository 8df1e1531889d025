"""Wait for actors with a limit, translate Ray's errors, and pick the root cause among several errors.

A wait for one result can be cancelled.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, TaskCancelledError

from raydist.actors.portable_errors import PortableError
from raydist.core.errors import CancelledError, DeadlineExceededError, RaydistError, UnavailableError
from raydist.core.exception_utils import annotate

GRACE_S = 5.0  # seconds for which the peers may still report after a first error
_SLICE_S = 0.2  # longest time that a wait for one result continues after it was cancelled


@final
class RemoteFailure(Exception):
    """A carrier of any exception out of an actor; the caller's side raises the exception itself.

    Args:
        portable: The exception.
        before: Result of the work that the call completed before it failed.
    """

    def __init__(self, portable: PortableError, before: Any = None) -> None:
        super().__init__(portable, before)
        self.portable = portable
        self.before = before

    def __str__(self) -> str:
        return self.portable.title


def wait_for(ref: Any, limit_s: float, cancelled: Callable[[], bool], *, actor: str) -> bool:
    """Return True if `ref`, which `actor` computes, has a result or an error within `limit_s`. Blocks; fetches nothing.

    Raises:
        CancelledError: `cancelled()` returned True first.
    """
    end = time.monotonic() + limit_s
    while True:
        if cancelled():
            raise CancelledError(
                f"The pool or the iterator that waited for {actor} was closed, so its result is not wanted any more. "
                "Take a new iterator to go on."
            )
        left = end - time.monotonic()
        if ray.wait([ref], timeout=max(0.0, min(_SLICE_S, left)), fetch_local=False)[0]:
            return True
        if left <= 0:
            return False


def wait_for_all(
    refs: Sequence[Any],
    names: Sequence[str],
    *,
    timeout_s: float,
    doing: str,
    limit: str,
    on_error: Callable[[], None],
) -> list[Any]:
    """Return the values of `refs`, one per actor of `names`. Blocks.

    After the first error, `wait_for_all` calls `on_error` (which should make the peers give up), gives the peers a
    short grace period to report, and raises the error that explains the others.

    Raises:
        UnavailableError: An actor died; the message names the actor.
        DeadlineExceededError: Some actors did not answer in `timeout_s`; the message names them and `limit`.
        Exception: A user's function raised; type and traceback are kept.
    """
    try:
        # Raises the first failure while the other actors are still running.
        return list(ray.get(list(refs), timeout=timeout_s))
    except SystemError as error:  # Ray 2.60 returns from a read while an exception of a signal handler is pending
        raise error.__cause__ or error from None
    except Exception as error:
        timed_out = isinstance(error, GetTimeoutError)
    on_error()
    outcomes = outcomes_of(refs, names, doing)
    silent = [name for ref, name in zip(refs, names, strict=True) if not _is_ready(ref)]
    if timed_out and all(outcome is None or isinstance(outcome, RaydistError) for outcome in outcomes):
        raise late_error(silent or names, doing, timeout_s, limit)
    raise missing(root_cause([outcome for outcome in outcomes if outcome is not None]), silent)


def may_be_loss(error: Exception) -> bool:
    """Return True for an error that the loss of a process, or of an object of Ray's store, can cause."""
    return isinstance(error, UnavailableError | DeadlineExceededError | RayError)


def missing(cause: Exception, silent: Sequence[str]) -> Exception:
    """Add a note that names the silent actors if `cause` only says that some peer is gone or silent."""
    of_peer = isinstance(cause, DeadlineExceededError) or (isinstance(cause, UnavailableError) and cause.actor is None)
    if silent and of_peer:
        # Ray takes longer to detect a lost machine than the peers do.
        annotate(cause, f"There is no answer from {' and '.join(silent)}: the process or its machine may be gone.")
    return cause


def late_error(late: Sequence[str], doing: str, timeout_s: float, limit: str) -> DeadlineExceededError:
    """Return the error for actors that did not answer in time."""
    return DeadlineExceededError(
        f"{doing} must end within {timeout_s:g} s, but {', '.join(late)} did not answer. "
        f"It may be stuck, or the work is longer than the limit: then raise {limit}."
    )


def _is_ready(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])


def done_before_failure(ref: Any) -> Any:
    """Return the result of the work that a failed call completed first (`RemoteFailure.before`).

    Returns the value itself if the call succeeded, and None if the actor died or has not answered yet.
    """
    try:
        return ray.get(ref, timeout=0)
    except RayTaskError as error:
        return error.cause.before if isinstance(error.cause, RemoteFailure) else None
    except (RayError, GetTimeoutError):
        return None


def outcomes_of(refs: Sequence[Any], names: Sequence[str], doing: str) -> list[Exception | None]:
    """Return the error of each ref, or None if it succeeded or is still pending after the grace period. Blocks."""
    if refs:
        ray.wait(list(refs), num_returns=len(refs), timeout=GRACE_S)
    outcomes: list[Exception | None] = []
    for ref, name in zip(refs, names, strict=True):
        try:
            ray.get(ref, timeout=0)
            outcomes.append(None)
        except GetTimeoutError:
            outcomes.append(None)
        except Exception as error:
            outcomes.append(translate_ray_error(error, name, doing))
    return outcomes


def translate_ray_error(error: Exception, name: str, doing: str) -> Exception:
    """Return the error to show to the user for an error that Ray raised about actor `name`."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause.portable.restore() if isinstance(cause, RemoteFailure) else error
    if isinstance(error, TaskCancelledError):
        return CancelledError(f"{doing} on {name} was cancelled.")
    if isinstance(error, RayActorError):
        return UnavailableError(
            f"{name} is gone while {doing} was under way: {_why(error)} "
            "The strategy cannot go on without it: close it and start again from your last checkpoint.",
            actor=name,
        )
    return error


def _why(error: RayActorError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1] + [line for line in lines[1:] if line.startswith(("pid", "The actor", "Worker"))])


def root_cause(errors: Sequence[Exception]) -> Exception:
    """Return the error that caused the others, given the errors of several replicas in one step.

    A dead process comes first, then errors of user code. Broken connections and cancelled work only follow from these.

    >>> str(root_cause([CancelledError("given up"), ValueError("bad label")]))
    'bad label'
    """
    return min(errors, key=_rank_of)


def _rank_of(error: Exception) -> int:
    if isinstance(error, UnavailableError) and error.actor is not None:
        return 0
    if not isinstance(error, RaydistError):
        return 1
    if isinstance(error, CancelledError):
        return 5
    if isinstance(error, UnavailableError):
        return 4
    return 3 if isinstance(error, DeadlineExceededError) else 2


_killed: deque[Any] = deque(maxlen=256)
"""The actors that were killed last, kept referenced until their processes are long gone.

Ray also asks an actor to exit once no reference to it is left. Both at once abort the actor's process (`~CoreWorker`).
"""


def kill_actors(actors: Sequence[Any]) -> None:
    """Kill actors at once. Do nothing if Ray, and the actors with it, are gone."""
    if not ray.is_initialized():
        return
    _killed.extend(actors)
    for actor in actors:
        with contextlib.suppress(Exception):  # actors of an earlier Ray session, which ended with it
            ray.kill(actor, no_restart=True)


def end_on_sigterm() -> None:
    """Make SIGTERM end this actor's process at once, as `ray.kill` does.

    Ray's handler shuts the interpreter down. Ray also sends SIGTERM to processes that are being killed already, when
    their reservation is released or the driver ends. Two concurrent exits of one process sometimes abort it.
    """
    if threading.current_thread() is threading.main_thread():  # signal handlers can only be set there
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def first_line(error: Exception) -> str:
    """Return the first line of a Ray error, which says what happened; the rest is about Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


_TITLES = (
    (re.compile(r"(.+)-input-[0-9a-f]{8}"), r"input pipeline of \1"),
    (re.compile(r"(.+)-input-[0-9a-f]{8}-worker-(\d+)"), r"input worker \2 of \1"),
    (re.compile(r"raydist-input-worker-(\d+)"), r"input worker \1"),
    (re.compile(r"(.+)-server-(\d+)"), r"parameter server \2 of \1"),
    (re.compile(r"(.+)-(replica|worker)-(\d+)"), r"\2 \3 of \1"),
)


def spoken_title(name: str) -> str:
    """Return a readable title for the actor `name`: its role and its strategy.

    >>> spoken_title("mirrored-1a2b3c4d-replica-0")
    'replica 0 of mirrored-1a2b3c4d'
    >>> spoken_title("mirrored-1a2b3c4d-input-55e6f708")
    'input pipeline of mirrored-1a2b3c4d'
    >>> spoken_title("mirrored-1a2b3c4d-input-55e6f708-worker-3")
    'input worker 3 of mirrored-1a2b3c4d'
    """
    found = ((pattern.fullmatch(name), title) for pattern, title in _TITLES)
    return next((match.expand(title) for match, title in found if match), name)


def title_of_this_actor() -> str:
    """Return the title of the actor that runs in this process, or "" outside an actor."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return spoken_title(context.get_actor_name() or "") if context.get_actor_id() else ""
