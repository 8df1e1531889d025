"""The handles of a strategy's replica actors: calls in the order of steps and beside them, and their end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from raydist.actors.bundle_options import bundle_options
from raydist.actors.relays import open_relays
from raydist.actors.replica_host import RELAY, CrowdedHost, ReplicaHost
from raydist.actors.reservation_guard import guard_reservation
from raydist.actors.step_answers import ref_of, wait_for_answers
from raydist.actors.step_channel import Answer, StepChannel
from raydist.actors.supervision import done_before_failure, kill_actors, wait_for_all
from raydist.channels.hub import ChannelHub
from raydist.cluster import release
from raydist.ray_session import RaySession

__all__ = ["ReplicaActors", "Seat"]

_NUM_CARRIED = 3  # messages that a host's relay carries at a time: what is worked on, what comes next, and one more
_DISCARD_S = 1.0  # refused steps answer at once; what does not is killed soon


@final
@dataclass(frozen=True, slots=True)
class Seat:
    """Where one replica's process runs.

    Attributes:
        bundle: Number of the reservation's bundle that it is in.
        resources: What it takes of that.
        env: Its environment variables.
        host: The name of its node, for messages; empty where nobody knows.
        node_id: Ray's name for it.
    """

    bundle: int
    resources: Mapping[str, float]
    env: Mapping[str, str]
    host: str = ""
    node_id: str = ""


@final
class ReplicaActors:
    """The handles of one strategy's replica actors, in rank order. Constructing starts the actors' processes.

    The actors are not detached: they die with the driver, and with the placement group.

    Args:
        group: The reservation.
        seats: Of the actors.
        name: The strategy's.
        per_process: How many consecutive replicas each actor has.
        kind: What they are called.
    """

    def __init__(
        self, group: PlacementGroup, seats: Sequence[Seat], *, name: str, per_process: int = 1, kind: str = "replica"
    ) -> None:
        self._group = group
        self._session = RaySession()
        self._name = name
        self._seats = tuple(seats)
        self._guard = guard_reservation(group)
        self._per_process = per_process
        self._handles = [self._launch(seat, f"{name}-{kind}-{n * per_process}") for n, seat in enumerate(self._seats)]
        everyone = [seat for seat in seats for _ in range(per_process)]
        self.names = tuple(_title(kind, rank, name, seat) for rank, seat in enumerate(everyone))
        self._channel: StepChannel | None = None
        self._has_relays = False
        self._hub: ChannelHub | None = None  # until it is known whether there is a channel
        self._num_replaced = 0
        self._kind = kind

    def _launch(self, seat: Seat, name: str) -> Any:
        several = self._per_process > 1
        threads = {"control": 1, **{_thread_of(place): 1 for place in range(self._per_process if several else 0)}}
        if not several:
            threads[RELAY] = _NUM_CARRIED
        decorate = ray.remote(concurrency_groups=threads)  # type: ignore[call-overload]  # an option Ray leaves out
        actor_class = decorate(CrowdedHost if several else ReplicaHost)
        options = bundle_options(self._group, seat.bundle, seat.resources, name)
        if several:
            return actor_class.options(**options).remote(self._per_process, dict(seat.env))
        num_neighbours = sum(other.node_id == seat.node_id for other in self._seats)
        return actor_class.options(**options).remote(dict(seat.env), num_neighbours)

    @property
    def reachable(self) -> bool:
        """Whether there is still the Ray that they are of."""
        return self._session.is_open

    def _handle(self, rank: int) -> Any:
        self._session.require(f"The strategy {self._name}")
        return self._handles[rank // self._per_process]

    def _ask(self, rank: int, method: str, *args: Any) -> Any:
        asked = getattr(self._handle(rank), method)
        if self._per_process == 1:
            return asked.remote(*args)
        place = rank % self._per_process
        return asked.options(concurrency_group=_thread_of(place)).remote(place, *args)

    def about(self, rank: int) -> Any:
        return self._ask(rank, "about")

    def start(self, rank: int, make_runner: Callable[..., Any], *args: Any) -> Any:
        return self._ask(rank, "start", make_runner, *args)

    def open_channel(self, within_s: float) -> None:
        """Let steps travel through shared memory, where this process and all replicas can share some, or by relays.

        What does not come about in this time does not.
        """
        opened = False
        try:
            asked = self.offer_channel()
            with contextlib.suppress(RayError):
                opened = bool(asked) and all(ray.get(asked, timeout=within_s))
        finally:
            self.settle_channel(opened=opened)
        if not asked and self._per_process == 1 and all(seat.node_id for seat in self._seats):
            with contextlib.suppress(RayError):
                self._open_relays(within_s)

    def _open_relays(self, within_s: float) -> None:
        hub = open_relays(self._handles, [seat.node_id for seat in self._seats], within_s)
        if hub is not None:
            self._channel = StepChannel(hub, len(self._seats), serve=self._serve, fetch=self._fetch)
            self._has_relays = True

    def offer_channel(self) -> list[Any]:
        """The first half of `open_channel`: what replicas will say to it. Nothing where there can be none."""
        if self._per_process > 1 or not all(
            seat.node_id == ray.get_runtime_context().get_node_id() for seat in self._seats
        ):
            return []
        try:
            self._hub = ChannelHub.open(len(self._seats))
        except OSError:
            return []
        hub = self._hub
        return [self._handle(rank).open_channel.remote(hub.ticket(rank)) for rank in range(len(self._seats))]

    def settle_channel(self, *, opened: bool) -> None:
        """The second half: whether all replicas have said yes. Calls nobody."""
        hub, self._hub = self._hub, None
        if hub is None:
            return
        if opened:
            hub.all_opened()
            self._channel = StepChannel(hub, len(self._seats), serve=self._serve, fetch=self._fetch)
        else:
            hub.close()

    def _serve(self, rank: int, turn: int) -> None:
        self._handle(rank).serve.remote(turn)

    def _fetch(self, rank: int, number: int) -> Any:
        return self._handle(rank).take_result.remote(number)

    def send_steps(self, messages: Sequence[tuple[Any, Sequence[Any]]]) -> list[Any]:
        """Send each replica its message and the objects that go along; returns what the answers will be known by."""
        if self._channel is not None and not any(objects for _, objects in messages):
            answers = self._channel.send([message.packed() for message, _ in messages])
            if answers is not None:
                return list(answers)
        if self._channel is not None:
            self._channel.leave_all()
        return [self._ask_in_order(rank, "steps", group, *refs) for rank, (group, refs) in enumerate(messages)]

    def send_to(self, rank: int, message: Any, objects: Sequence[Any]) -> Any:
        """Send a message and its objects to one replica; what the answer will be known by."""
        if self._channel is not None and not objects:
            answer = self._channel.send_to(rank, message.packed())
            if answer is not None:
                return answer
        return self._ask_in_order(rank, "steps", message, *objects)

    @property
    def channel(self) -> StepChannel | None:
        """The memory that steps come through, where there is one."""
        return self._channel

    @property
    def shares_memory(self) -> bool:
        """Whether messages travel through memory all the way."""
        return self._channel is not None and not self._has_relays

    def replace(self, rank: int) -> None:
        """Start another process for a replica; the one before is killed. It knows nothing and is to be started."""
        kill_actors([self._handles[rank]])
        ticket = None if self._channel is None else self._channel.replace(rank)
        self._session.require(f"The strategy {self._name}")
        self._num_replaced += 1
        name = f"{self._name}-{self._kind}-{rank}-again-{self._num_replaced}"
        self._handles[rank] = self._launch(self._seats[rank], name)
        if ticket is not None:
            self._handles[rank].open_channel.remote(ticket)

    def call(self, rank: int, method: str, *args: Any) -> Any:
        return self._ask_in_order(rank, "call", method, *args)

    def _ask_in_order(self, rank: int, method: str, *args: Any) -> Any:
        """Ask a replica for something that it does after all that it was sent."""
        if self._channel is not None:
            self._channel.leave(rank)
        return self._ask(rank, method, *args)

    def control_all(self, method: str, *args: Any) -> None:
        """Call beside the running steps, without waiting for an answer."""
        for handle in self._handles if self.reachable else ():
            for place in range(self._per_process):
                self._control(handle, place, method, *args)

    def _control(self, handle: Any, place: int, method: str, *args: Any) -> Any:
        return handle.control.remote(*(() if self._per_process == 1 else (place,)), method, *args)

    def ask_beside(self, rank: int, method: str, *args: Any) -> Any:
        """Ask a replica for something that it answers beside its steps. Any thread may ask."""
        return self._control(self._handle(rank), rank % self._per_process, method, *args)

    def wait(self, refs: Sequence[Any], names: Sequence[str], **limits: Any) -> list[Any]:
        """See `supervision.wait_for_all`."""
        self._session.require(f"The strategy {self._name}")
        if self._channel is not None and isinstance(refs[0], Answer):
            return wait_for_answers(self._channel, refs, names, **limits)
        return wait_for_all(refs, names, **limits)

    def done_before_failure(self, refs: Sequence[Any]) -> list[Any]:
        """See `supervision.done_before_failure`."""
        return [self._done_before(ref) for ref in refs]

    def _done_before(self, ref: Any) -> Any:
        if isinstance(ref, Answer) and ref.ref is None:
            return ref.value
        return done_before_failure(ref_of(ref)) if self.reachable else None

    def are_ready(self, refs: Sequence[Any], within_s: float) -> bool:
        """Whether all of `refs` are there, with values or errors; waits up to `within_s`."""
        if not self.reachable:
            return True  # as errors
        if self._channel is not None and isinstance(refs[0], Answer):
            return self._channel.wait(refs, within_s)
        return len(ray.wait(list(refs), num_returns=len(refs), timeout=within_s)[0]) == len(refs)

    def silent(self, within_s: float) -> list[str]:
        """Names of those whose process does not even answer beside its steps; waits up to `within_s`."""
        if not self.reachable:
            return []
        names = self.names[:: self._per_process]
        asked = {self._control(handle, 0, "ping"): name for handle, name in zip(self._handles, names, strict=True)}
        return [asked[ref] for ref in ray.wait(list(asked), num_returns=len(asked), timeout=within_s)[1]]

    def discard(self, refs: Sequence[Any]) -> None:
        """Drop results unread; an error among those that are there is not logged as unhandled."""
        held = [known for known in map(ref_of, refs) if known is not None]
        if not held or not self.reachable:
            return
        for ref in ray.wait(held, num_returns=len(held), timeout=_DISCARD_S)[0]:
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=0)

    def kill(self) -> None:
        """Kill the actors and give their reservation back. May be called twice."""
        self.settle_channel(opened=False)
        if self._channel is not None:
            self._channel.close()
        handles, self._handles = self._handles, []
        if self.reachable:
            kill_actors(handles)
            release(self._group)
            kill_actors([] if self._guard is None else [self._guard])


def _thread_of(place: int) -> str:
    """The concurrency group of one of several runners."""
    return f"place-{place}"


def _title(kind: str, rank: int, name: str, seat: Seat) -> str:
    return f"{kind} {rank} of {name}{f' on {seat.host}' if seat.host else ''}"
