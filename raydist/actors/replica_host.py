"""The actors around replicas: thin shells that host a runner each and pass calls on to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import ray

from raydist.actors.actor_titles import title_of_this_actor
from raydist.actors.background_threads import put_behind
from raydist.actors.main_thread_rest import MainThreadRest
from raydist.actors.portable_errors import pack_error
from raydist.actors.software import Software, installed_software
from raydist.actors.step_relay import Relayed, StepRelay
from raydist.actors.step_server import StepServer
from raydist.actors.supervision import RemoteFailure
from raydist.actors.workers.kept_pages import keep_pages
from raydist.channels.hub import ChannelEnd, ChannelHub, Ticket
from raydist.crowds import is_crowd
from raydist.deferred_compiler import defer_compiler
from raydist.errors import UnavailableError
from raydist.foreign_errors import describe
from raydist.fused_updates import speed_up_updates
from raydist.large_products import speed_up_products
from raydist.wide_pooling import speed_up_pooling

__all__ = ["RELAY", "CrowdedHost", "ReplicaHost"]

RELAY = "relay"  # the concurrency group of calls that pass messages on


@final
class ReplicaHost:
    """Hosts one runner. `steps` and `call` run in the order of their submission, `control` beside them.

    Args:
        env: Environment variables for this process.
        num_neighbours: How many of the group's processes are on this machine.
    """

    def __init__(self, env: Mapping[str, str] | None = None, num_neighbours: int = 1) -> None:
        # Libraries read these when they are imported, which is later. A runtime_env would do the same, but no process
        # that Ray holds ready has it: replicas would wait a second longer for new ones.
        os.environ.update(env or {})
        defer_compiler()
        speed_up_products()
        speed_up_pooling()
        speed_up_updates()
        keep_pages(None)  # activations and pieces of batches come and go with every step
        self._runner: Any = None
        self._end: ChannelEnd | None = None
        self._hub: ChannelHub | None = None  # of a relay
        self._relay: StepRelay | None = None
        self._kept: dict[int, Any] = {}
        self._failure: Exception | None = None  # of what serves, not of a step
        self._title = title_of_this_actor()
        self._main_thread = MainThreadRest(num_neighbours)
        self._in_crowd = is_crowd(num_neighbours)

    def __repr__(self) -> str:
        return self._title or type(self).__name__

    def about(self) -> Software:
        """What this process runs with."""
        with _errors_travel():
            return installed_software()

    def start(self, make_runner: Callable[..., Any], *args: Any) -> int:
        """Build the runner in this process; returns the process id."""
        with _errors_travel():
            self._runner = make_runner(*args)
        return os.getpid()

    def steps(self, group: Any, *objects: Any) -> Any:
        """Run some steps. `objects` were given as object refs: Ray has mapped them before this starts."""
        with _errors_travel(), self._rest_while(relaying=False):
            result = self._runner.steps(group, objects)
        return _told(result)

    def open_relay(self, num_replicas: int) -> list[Ticket]:
        """Be the one that messages to the replicas of this host come by: what these open channels with, or nothing."""
        try:
            self._hub = ChannelHub.open(num_replicas)
        except OSError:
            return []
        return [self._hub.ticket(end) for end in range(num_replicas)]

    def begin_relay(self) -> None:
        """All replicas of this host have opened theirs."""
        if self._hub is not None:
            self._hub.all_opened()
            self._relay = StepRelay(self._hub)

    @ray.method(concurrency_group=RELAY)
    def carry(self, number: int, messages: Sequence[tuple[int, bytes]]) -> Relayed:
        """See `StepRelay.carry`."""
        with self._rest_while(relaying=True):
            return self._get_relay().carry(number, messages)

    @ray.method(concurrency_group=RELAY)
    def collect(self) -> Relayed:
        """See `StepRelay.collect`."""
        return self._get_relay().collect()

    def _get_relay(self) -> StepRelay:
        if self._relay is None:
            raise UnavailableError("raydist bug: a relay must be begun before it is used.")
        return self._relay

    def open_channel(self, ticket: Ticket) -> bool:
        """Whether steps can come through the memory that the ticket names."""
        try:
            self._end = ChannelEnd.open(ticket)
        except OSError:
            return False
        if self._in_crowd and self._hub is None:  # and Ray's threads bring no steps
            put_behind()
        return True

    def serve(self, turn: int) -> None:
        """Run the steps that come through the channel, until this turn is over."""
        if self._end is not None:
            server = StepServer(self._end, self._runner, self._kept.__setitem__, reads_ahead=self._in_crowd)
            with self._rest_while(relaying=False):
                try:
                    server.serve(turn)
                except Exception as error:  # what was sent here is never answered: the driver must see nobody is there
                    self._failure = error
                    self._end.close()
                    self._end = None
                    raise

    def _rest_while(self, *, relaying: bool) -> contextlib.AbstractContextManager[None]:
        """Ray's calls bring steps to a relay, and few others: it rests while those that it has are on their way.

        What comes meanwhile is passed on once the first of these is answered: replicas that had run out of steps by
        then wait 2 ms for it.
        """
        is_relay = self._hub is not None
        return self._main_thread.while_busy() if relaying == is_relay else contextlib.nullcontext()

    def take_result(self, number: int) -> Any:
        """What came of a message of the channel, where that could not travel through it."""
        with _errors_travel():
            if number not in self._kept:
                reason = "the process that was to pass it on is gone"
                if self._failure is not None:
                    reason = f"this replica failed while it served steps ({describe(self._failure)})"
                raise UnavailableError(f"What came of a message is lost: {reason}.") from self._failure
        return _told(self._kept.pop(number))

    def call(self, method: str, *args: Any) -> Any:
        """A method of the runner, after every step dispatched before it."""
        with _errors_travel():
            return getattr(self._runner, method)(*args)

    @ray.method(concurrency_group="control")
    def control(self, method: str, *args: Any) -> Any:
        """A method of the runner that must not wait for steps: it runs in a thread of its own."""
        return getattr(self._runner, method)(*args)


@final
class CrowdedHost:
    """Hosts several runners, a thread each: it has the calls of :class:`ReplicaHost`, with the runner's place first.

    Args:
        num_runners: How many.
        env: Environment variables for this process.
    """

    def __init__(self, num_runners: int, env: Mapping[str, str] | None = None) -> None:
        self._hosts = [ReplicaHost(env) for _ in range(num_runners)]

    def about(self, place: int) -> Software:
        return self._hosts[place].about()

    def start(self, place: int, make_runner: Callable[..., Any], *args: Any) -> int:
        return self._hosts[place].start(make_runner, *args)

    def steps(self, place: int, group: Any, *objects: Any) -> Any:
        return self._hosts[place].steps(group, *objects)

    def call(self, place: int, method: str, *args: Any) -> Any:
        return self._hosts[place].call(method, *args)

    @ray.method(concurrency_group="control")
    def control(self, place: int, method: str, *args: Any) -> Any:
        return self._hosts[place].control(method, *args)


def _told(result: Any) -> Any:
    """The result of some steps, or their error."""
    if result.error is not None:
        raise RemoteFailure(pack_error(result.error), replace(result, error=None)) from None
    return result


@contextlib.contextmanager
def _errors_travel() -> Iterator[None]:
    """Ray loses exceptions that do not pickle well, and takes KeyboardInterrupt for a cancelled task."""
    try:
        yield
    except BaseException as error:
        raise RemoteFailure(pack_error(error)) from None
