"""Ray actors that each host a replica's runner, and the driver's handles of these actors."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, final

import ray
from ray.exceptions import RayActorError, RayError

from raydist.actors.portable_errors import pack_error
from raydist.actors.reservations import bundle_options, guard_reservation
from raydist.actors.supervision import (
    RemoteFailure,
    done_before_failure,
    end_on_sigterm,
    first_line,
    kill_actors,
    title_of_this_actor,
    wait_for_all,
)
from raydist.actors.version_check import Software, installed_software
from raydist.actors.workers.memory_limit import keep_freed_memory
from raydist.cluster.nodes import living_nodes, release
from raydist.cluster.ray_session import RaySession, draining_nodes
from raydist.cluster.reservation import Reservation
from raydist.core.errors import FailedPreconditionError

_LOG_LEVEL = "RAYDIST_LOG_LEVEL"
_DEBUGGER = "RAY_DEBUG"  # "legacy" is `ray debug`, which needs no further package


def console_settings() -> dict[str, str]:
    """Return the environment variables that give replicas the driver's log level and debugger setting."""
    settings = {_LOG_LEVEL: str(logging.getLogger().level)}
    if _DEBUGGER in os.environ:
        settings[_DEBUGGER] = os.environ[_DEBUGGER]
    return settings


def open_console(title: str) -> None:
    """Log to stderr from the driver's level on, and make `breakpoint()` either work or raise an error that helps.

    Args:
        title: Title of this actor, for example "replica 1 of mirrored-1a2b3c4d".
    """
    short = title.partition(" of ")[0]
    root = logging.getLogger()
    root.setLevel(int(os.environ.get(_LOG_LEVEL, logging.WARNING)))
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)  # Ray forwards stderr to the driver
        handler.setFormatter(logging.Formatter(f"[{short}] %(levelname)s:%(name)s:%(message)s"))
        root.addHandler(handler)
    if os.environ.get(_DEBUGGER) != "legacy" and importlib.util.find_spec("debugpy") is None:
        sys.breakpointhook = functools.partial(_refuse_breakpoint, short)  # Ray's hook only logs a line


def _refuse_breakpoint(title: str, *_: Any, **__: Any) -> NoReturn:
    raise FailedPreconditionError(
        f"breakpoint() needs a terminal, and {title} has none. Run the program with rd.OneDeviceStrategy, where "
        "breakpoint() is pdb as usual; or set RAY_DEBUG=legacy before the program starts and call `ray debug` in "
        "another terminal; or install debugpy, for Ray's distributed debugger."
    )


_GPUS_S = 10.0
_DISCARD_S = 1.0  # refused steps answer at once; an actor that does not answer is killed soon


@final
@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """The bundle, resources and environment of one replica's process.

    Attributes:
        bundle: Index of the bundle in the reservation.
        resources: Resources that the process takes from the bundle.
        env: Environment variables of the process.
        host: Name of the node, for messages; empty if unknown.
        node_id: Ray's id of the node.
    """

    bundle: int
    resources: Mapping[str, float]
    env: Mapping[str, str]
    host: str = ""
    node_id: str = ""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A reserved bundle, for one replica or several."""

    reservation: Reservation
    bundle: int

    @property
    def host(self) -> str:
        """The id of the bundle's node. While Ray looks for another node it is that of the lost one, or empty."""
        return self.reservation.present_host(self.bundle) or ""


@final
class ReplicaActors:
    """The handles of one strategy's replica actors, in rank order. The constructor starts the actors' processes.

    The actors are not detached: they die with the driver, and with the placement group.

    Args:
        reservation: The bundles of the replicas.
        slots: The bundle, resources and environment of each actor.
        name: Name of the strategy.
        per_process: Number of consecutive replicas in each actor.
        kind: Word for a replica in names: "replica" or "worker".
        num_spares: Number of processes that wait to take a lost replica's place, on the node of the first slot.
    """

    def __init__(
        self,
        reservation: Reservation,
        slots: Sequence[ReplicaSlot],
        *,
        name: str,
        per_process: int = 1,
        kind: str = "replica",
        num_spares: int = 0,
    ) -> None:
        self._reservations = [reservation] * len(slots)  # the reservation of each slot
        self._guards = {reservation: guard_reservation(reservation)}
        self._idle: list[Place] = []
        self._session = RaySession()
        self._name = name
        self._slots = list(slots)
        self._resources = slots[0].resources
        self._per_process = per_process
        self._handles = [
            self._launch(reservation, slot, f"{name}-{kind}-{n * per_process}") for n, slot in enumerate(self._slots)
        ]
        everyone = [slot for slot in slots for _ in range(per_process)]
        self.names = [_title(kind, rank, name, slot) for rank, slot in enumerate(everyone)]
        self._num_replaced = self._num_spares = 0
        self._kind = kind
        self._spares = [self._launch_spare() for _ in range(num_spares)]
        self._prepared: Callable[..., Any] | None = None

    def _launch_spare(self) -> Any:
        self._num_spares += 1
        slot = replace(self._slots[0], resources={})  # the bundle is reserved as a whole
        return self._launch(self._reservations[0], slot, f"{self._name}-{self._kind}-spare-{self._num_spares}")

    def prepare_spares(self, make_runner: Callable[..., Any]) -> None:
        """Make the spare processes, and later ones, import what a runner needs. Does not block."""
        self._prepared = make_runner
        for spare in self._spares:
            spare.prepare.remote(make_runner)

    def _launch(self, reservation: Reservation, slot: ReplicaSlot, name: str) -> Any:
        places = range(self._per_process if self._per_process > 1 else 0)  # one replica alone has the main thread
        threads = {"control": 1, **{_thread_of(place): 1 for place in places}}
        decorate = ray.remote(concurrency_groups=threads)  # type: ignore[call-overload]  # an option Ray leaves out
        options = bundle_options(reservation, slot.bundle, slot.resources, name)
        return decorate(ReplicaHost).options(**options).remote(dict(slot.env))

    @property
    def reachable(self) -> bool:
        """True while the Ray session of the actors is open."""
        return self._session.is_open

    def _handle(self, rank: int) -> Any:
        self._session.require(f"The strategy {self._name}")
        return self._handles[rank // self._per_process]

    def _ask(self, rank: int, method: str, *args: Any) -> Any:
        place = rank % self._per_process
        asked = getattr(self._handle(rank), method)
        if self._per_process > 1:
            asked = asked.options(concurrency_group=_thread_of(place))
        return asked.remote(place, *args)

    def about(self, rank: int) -> Any:
        return self._ask(rank, "about")

    def start(self, rank: int, make_runner: Callable[..., Any], *args: Any) -> Any:
        return self._ask(rank, "start", make_runner, *args)

    def send(self, rank: int, message: Any, objects: Sequence[Any]) -> Any:
        """Send steps and their object refs to one replica without waiting; return the ref of the answer."""
        return self._ask(rank, "steps", message, *objects)

    def replace(self, rank: int) -> None:
        """Kill a replica's process. Put a spare or a new one in its place, which has no state and must be started."""
        process = rank // self._per_process
        kill_actors([self._handles[process]])
        self._session.require(f"The strategy {self._name}")
        if self._spares and self._slots[process].node_id == self._slots[0].node_id:
            self._handles[process] = self._spares.pop(0)
            self._spares.append(self._launch_spare())
            self._spares[-1].prepare.remote(self._prepared)
            return
        reservation, slot = self._reservations[process], self._slots[process]
        self._handles[process] = self._launch(reservation, slot, self._later_name(rank))

    def replace_all(self) -> None:
        """Replace every process."""
        for rank in range(0, len(self.names), self._per_process):
            self.replace(rank)

    def _later_name(self, rank: int) -> str:
        self._num_replaced += 1
        return f"{self._name}-{self._kind}-{rank}-again-{self._num_replaced}"

    def replace_beside(self, rank: int, other: int) -> None:
        """Put a new process into a replica's place, beside another one that lives: in its bundle, on its GPU."""
        kill_actors([self._handles[rank]])
        if self._slots[rank].resources:
            self._idle.append(Place(self._reservations[rank], self._slots[rank].bundle))
        slot = self._slots[other]
        gpus: dict[str, str] = ray.get(self._handles[other].control.remote(0, "gpus"), timeout=_GPUS_S)
        self._put(rank, self._reservations[other], replace(slot, resources={}, env={**slot.env, **gpus}))

    def replace_in(self, rank: int, place: Place) -> None:
        """Put a new process into a replica's place, in a reserved place that no replica uses."""
        kill_actors([self._handles[rank]])
        self._idle.remove(place)
        slot = replace(self._slots[rank], bundle=place.bundle, resources=self._resources, node_id=place.host)
        self._put(rank, place.reservation, slot)

    def _put(self, rank: int, reservation: Reservation, slot: ReplicaSlot) -> None:
        self._reservations[rank], self._slots[rank] = reservation, slot
        self._handles[rank] = self._launch(reservation, slot, self._later_name(rank))
        self.names[rank] = _title(self._kind, rank, self._name, slot)

    def add(self, place: Place, slot: ReplicaSlot) -> None:
        """Start the process of a further replica, behind the last rank. Does not block."""
        if place.reservation not in self._guards:
            self._guards[place.reservation] = guard_reservation(place.reservation)
        if place in self._idle:
            self._idle.remove(place)
        rank = len(self._slots)
        self._slots.append(slot)
        self._reservations.append(place.reservation)
        self._handles.append(self._launch(place.reservation, slot, self._later_name(rank)))
        self.names.append(_title(self._kind, rank, self._name, slot))

    def keep(self, ranks: Sequence[int]) -> None:
        """Kill all processes but these, which get the ranks 0, 1, ... in this order."""
        for rank in set(range(len(self._slots))) - set(ranks):
            kill_actors([self._handles[rank]])
            if self._slots[rank].resources:
                self._idle.append(Place(self._reservations[rank], self._slots[rank].bundle))
        self._handles = [self._handles[rank] for rank in ranks]
        self._slots = [self._slots[rank] for rank in ranks]
        self._reservations = [self._reservations[rank] for rank in ranks]
        self.names[:] = [_title(self._kind, rank, self._name, slot) for rank, slot in enumerate(self._slots)]
        for reservation in self._guards.keys() - set(self._reservations):
            self._release(reservation)
            self._idle = [each for each in self._idle if each.reservation != reservation]

    def holds(self, reservation: Reservation) -> bool:
        """Return True if `kill` releases the reservation."""
        return reservation in self._guards

    @property
    def num_idle(self) -> int:
        """Number of reserved places that no replica uses."""
        return len(self._idle)

    def idle_places(self) -> list[Place]:
        """Return those of them that are on nodes that live, and are not drained."""
        if not self._idle:
            return []
        usable = {node.node_id for node in living_nodes()} - draining_nodes()
        return [each for each in self._idle if each.host in usable]

    def _release(self, reservation: Reservation) -> None:
        guard = self._guards.pop(reservation)
        release(reservation)
        kill_actors([] if guard is None else [guard])

    def present_host(self, rank: int) -> str:
        """Return the node of a replica that has started; a replacement may be on another node."""
        place = rank // self._per_process
        return self._reservations[place].present_host(self._slots[place].bundle)

    def moved(self, rank: int, node_id: str, host: str) -> None:
        """Record that a replacement runs on another node, whose name is `host`."""
        self._slots[rank] = replace(self._slots[rank], host=host, node_id=node_id)
        self.names[rank] = _title(self._kind, rank, self._name, self._slots[rank])

    def call(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method of a replica's runner after everything sent to the replica so far; return the ref."""
        return self._ask(rank, "call", method, *args)

    def control_all(self, method: str, *args: Any) -> None:
        """Call a method of every runner concurrently with running steps, without waiting for an answer."""
        for handle in self._handles if self.reachable else ():
            for place in range(self._per_process):
                handle.control.remote(place, method, *args)

    def ask_beside(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method of a replica's runner concurrently with its steps; return the ref. Thread-safe."""
        return self._handle(rank).control.remote(rank % self._per_process, method, *args)

    def wait(self, refs: Sequence[Any], names: Sequence[str], **limits: Any) -> list[Any]:
        """Return the values of `refs`; blocks as `supervision.wait_for_all` does."""
        self._session.require(f"The strategy {self._name}")
        return wait_for_all(refs, names, **limits)

    def done_before_failure(self, refs: Sequence[Any]) -> list[Any]:
        """Return `supervision.done_before_failure` for each ref."""
        return [done_before_failure(ref) if self.reachable else None for ref in refs]

    def are_ready(self, refs: Sequence[Any], within_s: float) -> bool:
        """Return True if every ref of `refs` has a value or an error; block for up to `within_s`."""
        if not self.reachable:
            return True  # with errors
        return len(ray.wait(list(refs), num_returns=len(refs), timeout=within_s)[0]) == len(refs)

    def silent(self, within_s: float) -> list[str]:
        """Return the names of actors that do not answer a ping within `within_s`, even beside their steps."""
        if not self.reachable:
            return []
        names = self.names[:: self._per_process]
        asked = {handle.control.remote(0, "ping"): name for handle, name in zip(self._handles, names, strict=True)}
        return [asked[ref] for ref in ray.wait(list(asked), num_returns=len(asked), timeout=within_s)[1]]

    def lost(self, within_s: float) -> dict[int, str]:
        """Return the replicas whose process is gone, or does not answer a ping within `within_s`, with the reason."""
        if not self.reachable:
            return {}
        asked = [handle.control.remote(0, "ping") for handle in self._handles]
        ready = set(ray.wait(asked, num_returns=len(asked), timeout=within_s)[0])
        found: dict[int, str] = {}
        for rank, ref in zip(range(0, len(self.names), self._per_process), asked, strict=True):
            if ref not in ready:
                found[rank] = f"{self.names[rank]} does not answer"
                continue
            try:
                ray.get(ref, timeout=0)
            except RayActorError as error:
                found[rank] = f"{self.names[rank]} is gone: {first_line(error).rstrip('.')}"
            except RayError:
                pass  # it lives; an error of its own is told elsewhere
        return found

    def discard(self, refs: Sequence[Any]) -> None:
        """Drop results unread, so that Ray does not log their errors as unhandled."""
        if not refs or not self.reachable:
            return
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=_DISCARD_S)[0]:
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=0)

    def kill(self) -> None:
        """Kill the actors and release their reservation. May be called twice."""
        handles, self._handles, self._spares = [*self._handles, *self._spares], [], []
        if self.reachable:
            kill_actors(handles)
            for reservation in tuple(self._guards):
                self._release(reservation)


def _thread_of(place: int) -> str:
    return f"place-{place}"


def _title(kind: str, rank: int, name: str, slot: ReplicaSlot) -> str:
    return f"{kind} {rank} of {name}{f' on {slot.host}' if slot.host else ''}"


@final
class ReplicaHost:
    """The actor that hosts runners, one thread each. Their steps and calls run in submission order.

    `place` is the number of a runner in this process: the processes of CPUs and GPUs have one runner, a process of TPU
    chips has one for each chip.

    Args:
        env: Environment variables to set in this process.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        # Libraries read these variables when they are imported, which is later. A runtime_env would do the same, but
        # no process that Ray keeps ready has one: replicas would wait a second longer for new processes.
        os.environ.update(env or {})
        keep_freed_memory()  # activations and parts of batches are allocated and freed in every step
        self._runners: dict[int, Any] = {}
        self._title = title_of_this_actor()
        if self._title:
            open_console(self._title)
            end_on_sigterm()

    def __repr__(self) -> str:
        return self._title or type(self).__name__

    def about(self, place: int) -> Software:
        """Return the versions and devices of this process."""
        with _errors_travel():
            return installed_software()

    def prepare(self, make_runner: Callable[..., Any] | None) -> None:
        """Import what `about` needs; `make_runner` has been imported by now."""
        installed_software()

    def start(self, place: int, make_runner: Callable[..., Any], *args: Any) -> int:
        """Build a runner in this process, in the place of an earlier one; returns the process id."""
        with _errors_travel():
            if self._runners.pop(place, None) is not None:
                gc.collect()  # the earlier runner's parameters, which lie in reference cycles
            self._runners[place] = make_runner(*args)
        return os.getpid()

    def steps(self, place: int, message: Any, *objects: Any) -> Any:
        """Run the steps of a message and return their results. Blocks until they end.

        Ray has resolved the object refs among `objects`. Ray returns results of up to 100 KB inline with the answer,
        without the object store.

        Raises:
            RemoteFailure: A step failed; holds the results of the steps before it.
        """
        with _errors_travel():
            result = self._runners[place].steps(message, objects)
        if result.error is not None:
            raise RemoteFailure(pack_error(result.error), replace(result, error=None)) from None
        return result

    def call(self, place: int, method: str, *args: Any) -> Any:
        """Call a method of a runner, after every step dispatched before this call."""
        with _errors_travel():
            return getattr(self._runners[place], method)(*args)

    @ray.method(concurrency_group="control")
    def control(self, place: int, method: str, *args: Any) -> Any:
        """Call a method of a runner in a separate thread, without waiting for steps. Do nothing before it starts."""
        runner = self._runners.get(place)
        return None if runner is None else getattr(runner, method)(*args)


@contextlib.contextmanager
def _errors_travel() -> Iterator[None]:
    """Wrap errors in RemoteFailure: Ray loses unpicklable ones, and takes KeyboardInterrupt for a cancelled task."""
    try:
        yield
    except BaseException as error:
        raise RemoteFailure(pack_error(error)) from None
