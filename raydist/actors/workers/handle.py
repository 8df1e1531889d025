"""One InputWorker actor as its pool sees it: what it was given, what it knows, whether it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, final

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydist.actors.reservations import resource_options
from raydist.actors.software import installed_packages
from raydist.actors.supervision import first_line, kill_actors, wait_for
from raydist.actors.workers.buffered_results import BufferedBlock, write_block
from raydist.actors.workers.last_words import LastWords
from raydist.actors.workers.shared_buffers import BufferLease, BufferShelf
from raydist.actors.workers.worker import InputWorker
from raydist.errors import CancelledError, DeadlineExceededError, UnavailableError
from raydist.owning_process import OwningProcess
from raydist.pipelines.elements.blocks import Block
from raydist.ray_session import RaySession

__all__ = ["WorkerHandle", "WorkerKind"]

_INLINE_BYTES = 1 << 16  # smaller blocks travel with the call

KEPT_STAGES = 64
"""Stages that a worker keeps; every pass of a `repeat` has its own."""


@final
@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What the workers of one pool have in common.

    Attributes:
        resources: Ray resources of each; none means that they share the cores with what runs beside them.
        node_ids: Ray nodes to run on, in turn; none for any. Of several each may be left out when it is gone.
        memory_bytes: What each may take beyond what it needs to start; None for what is free on its machine then.
        start_s: Limit of its start.
    """

    resources: Mapping[str, float] = field(default_factory=dict)
    node_ids: tuple[str, ...] = ()
    memory_bytes: int | None = None
    start_s: float = 120.0

    def start(self, name: str, number: int = 0) -> Any:
        """The actor of that number; does not wait for it."""
        node, soft = None, False
        if self.node_ids:
            node_id, soft = self.node_ids[number % len(self.node_ids)], len(self.node_ids) > 1
            node = NodeAffinitySchedulingStrategy(node_id, soft=soft)
        options = {
            "name": name,
            **resource_options(self.resources),
            # Ray 2.60 keeps a soft affinity only of actors that ask for something: one byte is enough.
            "memory": self.resources.get("memory", 1 if soft else None),
            "scheduling_strategy": node,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        limit = self.memory_bytes or self.resources.get("memory")
        return ray.remote(InputWorker).options(**options).remote(name, None if limit is None else int(limit))


@final
class WorkerHandle:
    """An actor and its blocks under way, oldest first. Its pool's lock guards all but :meth:`await_start`.

    Attributes:
        name: The actor's name.
        shelf: Buffers for its results.
        shares: Whether it has shown that it can open them.
        started: Whether it has shown that it runs.
        words: What it said when its own code ended it.
    """

    def __init__(self, name: str, kind: WorkerKind, actor: Any) -> None:
        self.name = name
        self.shelf = BufferShelf()
        self._block_shelf = BufferShelf()  # apart: a small block's buffer has few pages that are there already
        self.shares = False
        self.started = False
        self.words = LastWords()
        self._process = OwningProcess("An input worker")
        self._session = RaySession()
        self._kind = kind
        self._actor = actor
        self._ready: Any = actor.hello.remote(self.words.path, installed_packages())
        self._ran = False
        self._under_way: deque[Any] = deque()
        self._read_from: dict[Any, Any] = {}  # the memory of blocks that it may not have read yet
        self._digests: deque[bytes] = deque()

    @classmethod
    def start(cls, name: str, kind: WorkerKind, number: int = 0) -> Self:
        """A new actor, of that number in its pool; does not wait for it."""
        return cls(name, kind, kind.start(name, number))

    @property
    def under_way(self) -> tuple[Any, ...]:
        """References to the results of its blocks that were not finished when last looked."""
        return tuple(self._under_way)

    @property
    def reachable(self) -> bool:
        """Whether there is still the Ray that it is of."""
        return self._session.is_open

    @property
    def runs(self) -> bool:
        """Whether its process is there, or was. Asks Ray until it is."""
        if not self._ran and self._ready is not None:
            self._ran = bool(ray.wait([self._ready], timeout=0, fetch_local=False)[0])
        return self._ran or self.started

    def forget_finished(self, finished: set[Any]) -> int:
        """Leave out what is `finished`; the number of blocks that are left."""
        while self._under_way and self._under_way[0] in finished:
            self._read_from.pop(self._under_way.popleft(), None)
        return len(self._under_way)

    def run(self, digest: bytes, stage: bytes, block: Block, starts: tuple[int, ...]) -> Any:
        """Send a block; a stage comes along the first time. The reference to the result."""
        ref = self._actor.run.remote(digest, self._unknown(digest, stage), block, starts)
        self._under_way.append(ref)
        return ref

    def run_into(self, lease: BufferLease, digest: bytes, stage: bytes, block: Block, starts: tuple[int, ...]) -> Any:
        """:meth:`run`, with a buffer for the result; the block may travel in another one."""
        argument, memory = self._buffered(block)
        ref = self._actor.run_into.remote(lease.address, digest, self._unknown(digest, stage), argument, starts)
        self._under_way.append(ref)
        if memory is not None:
            self._read_from[ref] = memory
        return ref

    def _buffered(self, block: Block) -> tuple[Block | BufferedBlock, Any]:
        num_bytes = sum(column.nbytes for column in block.columns if column.dtype != object)
        lease = self._block_shelf.lease() if self.shares and num_bytes > _INLINE_BYTES else None
        if lease is None:
            return block, None
        memory = lease.open()
        return write_block(block, lease.address, memory) or block, memory

    def _unknown(self, digest: bytes, stage: bytes) -> bytes | None:
        """The stage if the worker does not know it yet."""
        if digest in self._digests:
            return None
        self._learn(digest)
        return stage

    def _learn(self, digest: bytes) -> None:
        self._digests.append(digest)
        if len(self._digests) > KEPT_STAGES:
            self._actor.forget.remote([self._digests.popleft()])

    def await_start(self, cancelled: Callable[[], bool]) -> None:
        """Return once it runs. Waits up to `start_s`; CancelledError as soon as `cancelled()`.

        Raises:
            RayActorError: It died before.
        """
        self._session.require(f"Input worker {self.name}")
        ready = self._ready
        if ready is None:
            return
        if not wait_for(ready, self._kind.start_s, cancelled, actor=self.name):
            raise DeadlineExceededError(
                f"Input worker {self.name} must start within {self._kind.start_s:g} s (Timeouts.start_s), and has "
                f"not. It asks for {dict(self._kind.resources) or 'no resources'}: the cluster may have nothing left."
            )
        try:
            ray.get(ready)
        except RayError as error:
            if cancelled():
                raise CancelledError(
                    f"The pool of input worker {self.name} was closed while that started. Take a new iterator to go on."
                ) from None
            if isinstance(error, RayActorError):
                raise
            raise UnavailableError(
                f"Input worker {self.name} cannot start: {first_line(error)} Iterate again, or load the last saved "
                "state.",
                actor=self.name,
            ) from error
        self._ready, self.started = None, True

    def block_at_work(self) -> Any:
        """Of a dead worker: the reference to the block that it died on; None if it had finished all it had."""
        for ref in self._under_way:
            try:
                ray.get(ref, timeout=0)
            except RayActorError:
                return ref
            except RayError:  # finished, if badly
                continue
        return None

    def retire(self) -> None:
        """End the actor once it has finished what it has."""
        self._actor.__ray_terminate__.remote()

    def kill(self) -> None:
        """End the actor at once; nothing in a forked child, which has a copy of the handle."""
        if self._process.is_this and self._session.is_open:
            kill_actors([self._actor])
