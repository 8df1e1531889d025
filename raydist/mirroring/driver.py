"""The driver side of mirroring: the user's objects, and the payload that the driver sends with each step.

An object stays plain until a step references it. Then the driver sends it once and makes it *mirrored* in place: the
program keeps the same object, a read of the object fetches the present values of the replicas, and the driver finds
writes before the next step. A program that only runs steps pays for pickling its function, and nothing per parameter.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, final

import torch
from torch.nn.parameter import is_lazy

from raydist.checkpoints.checkpoint import ShardSaver
from raydist.compat.torch_internals import buffer_table, mark_as_stepped
from raydist.core.errors import FailedPreconditionError
from raydist.core.exception_utils import collect_errors
from raydist.mirroring.attributes import ControlState
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.lazy_states import LazyStates, metrics_in
from raydist.mirroring.messages import MirrorCalls, ReplicaLink, StepPayload, Writes
from raydist.mirroring.object_kinds import held_parameters, modules_of
from raydist.mirroring.objects import MirroredClasses
from raydist.mirroring.scope import Scope, ScopeCheck
from raydist.mirroring.step_pickler import SentFunctions, StepPickler
from raydist.mirroring.variables import Variables
from raydist.parameter_servers.local_rows import access_to, attach_access, is_table, spec_of
from raydist.pickling.attribute_table import AttributeTable
from raydist.pickling.pickler import PersistentId, loads
from raydist.utils.torch_modes import outside_inference_mode

_READ_SEVERAL = {
    *("forward", "state_dict", "parameters", "named_parameters", "buffers", "named_buffers", "param_groups"),
    *("__deepcopy__", "__reduce_ex__"),
}
"""Attributes of modules and optimizers by which a program reads more than one tensor."""


TableStates = list[tuple[torch.Tensor, list[dict[str, Any]]]]
"""Parameters that stand for tables, each with the states of the table's rows."""

_HELD_S = 0.2  # for which another thread waits for the lock before it marks values as stale without it


@final
class MirrorDriver:
    """The mirrored objects of one strategy.

    Their state has three parts, each of which caches what the driver read and finds what it wrote: attributes
    (`ControlState`), parameters and buffers (`Variables`), and states of optimizers and metrics (`LazyStates`).

    For each step the strategy calls `prepare`, sends the payload, and calls `dispatched`; after a failed step, `reset`.

    `name` is the strategy's, for messages; `devices` returns the device types of the replicas; `row_holders` returns
    the number of replicas that rows of embedding tables are divided among: 1 if each can read all of them from servers,
    0 if there can be no tables.
    """

    def __init__(
        self,
        name: str,
        link: ReplicaLink,
        devices: Callable[[], Collection[str]] = lambda: ("cpu",),
        *,
        row_holders: Callable[[], int] = lambda: 0,
    ) -> None:
        self._name = name
        self._link = link
        self._lock = threading.RLock()
        self._scope = Scope()
        self._table = DriverTable()
        self._row_holders = row_holders
        self._scope_check = ScopeCheck(name, self._scope, devices, self._table, serves_rows=lambda: row_holders() > 0)
        self._classes = MirroredClasses(self)
        self._variables = Variables(link, self._table, self._scope_check, self._refresh_modules)
        self._control = ControlState(link, self._table, loads=self._loads, set_flag=self._variables.set_flag)
        self._states = LazyStates(link, self._table, loads=self._loads)
        self._functions = SentFunctions()
        self._pending: StepPayload | None = None
        self._found: tuple[list[tuple[int, Any]], dict[int, AttributeTable]] = [], {}
        self._released = False
        self.shard_saver: ShardSaver | None = None
        """Makes replicas save their state themselves; None if the driver reads and saves it."""

    def save_mode(self, obj: Any) -> Literal["divided", "whole"]:
        """Return "divided" if every replica saves a part of an object, "whole" if the first replica saves all of it."""
        if not isinstance(obj, torch.nn.Module):
            return "divided"
        buffers = (buffer for part in modules_of(obj) for buffer in buffer_table(part).values())
        return "whole" if self.has_metrics(obj) or any(buffer is not None for buffer in buffers) else "divided"

    def driver_items(self, objects: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        """Return, by metric and state, the number of list items the first replica gets from the driver, up to now."""
        with self._lock:
            metrics = metrics_in(objects)
            return {name: self._states.driver_items(obj, self._table.handle_of(obj)) for name, obj in metrics.items()}

    def handle_of(self, obj: Any) -> int | None:
        """Return the handle of an object on the replicas (also one in the last payload); None for a driver object."""
        known = self._table.handle_of(obj)
        return next((handle for handle, new in self._found[0] if new is obj), None) if known is None else known

    def has_metrics(self, obj: Any) -> bool:
        """Return True for a metric or a module that contains one. Does not block."""
        return bool(metrics_in({"": obj}))

    def holds(self, obj: Any) -> bool:
        """Return True if replicas have a module or optimizer, or it was made here and can be sent. Does not block."""
        if self._released:
            return False
        if self.is_mirrored(obj):
            return True
        parameters = list(held_parameters(obj))
        made_here = obj in self._scope if isinstance(obj, torch.nn.Module) else bool(parameters)
        return made_here and all(
            (each in self._scope or self.is_mirrored(each)) and not is_lazy(each) for each in parameters
        )

    def is_mirrored(self, obj: Any) -> bool:
        """Return True if the replicas have `obj` already."""
        return self._table.handle_of(obj) is not None

    @property
    def has_tables(self) -> bool:
        """True once a `ShardedEmbedding` was created under the scope."""
        return self._scope.has_tables

    def has_made(self, obj: Any) -> bool:
        """Return True if a module or variable was created under the scope. Does not block."""
        return obj in self._scope

    def scope(self, adopt: Callable[[Any], None] | None = None) -> AbstractContextManager[None]:
        """Record objects created in the block as objects of this strategy; `adopt` is called with each object."""
        self._require_open()
        return self._scope.enter(adopt)

    @outside_inference_mode
    def prepare(
        self,
        fn: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        injected: Mapping[str, Any] | None = None,
        carried: Sequence[Any] = (),
    ) -> StepPayload:
        """Return a payload with everything that one step needs and the replicas do not have.

        Every replica must apply the payloads in the order of the calls; if one cannot, call :meth:`reset`. Waits for
        dispatched steps only if the driver changed an object without having read it.

        Args:
            fn: The step function.
            args: Positional arguments of `fn`; `PerReplica` leaves become placeholders.
            kwargs: Keyword arguments of `fn`.
            injected: Objects that every replica has already, under the names given to `MirrorReplica`.
            carried: Modules to send to the replicas even if the step does not reference them.

        Raises:
            FailedPreconditionError: A referenced object was not created under this strategy's scope, belongs to another
                strategy, cannot be pickled, or was changed both by the last step and by the driver.
        """
        with self._lock:
            self._require_open()
            pickler = StepPickler(self._table, self._scope_check, injected or {})
            function, digest = self._functions.pickle(pickler, fn)
            arguments = pickler.pickle((tuple(args), dict(kwargs or {})), "the arguments of run")
            for each in carried:
                if not self.is_mirrored(each):
                    pickler.pickle(each, "what all steps have")
            released = self._table.released  # objects dropped later may be in `writes`: the next payload releases them
            writes = Writes()
            attributes = self._collect(writes)
            pickler.adopt_buffers(writes)
            payload = StepPayload(
                released=released,
                writes=pickler.pickle(writes, "what the driver changed") if writes else b"",
                bundle=pickler.bundle(),
                function=function,
                digest=digest,
                forget=self._functions.too_many(digest),
                arguments=arguments,
                per_replica=tuple(pickler.per_replica),
            )
            payload.summarize(writes)
            self._pending = payload
            self._found = pickler.new, attributes
            return payload

    def _collect(self, writes: Writes) -> dict[int, AttributeTable]:
        """Add all changes of the driver to `writes`; return the present attributes of the objects that may differ."""
        attributes = self._control.collect(writes)
        self._variables.collect(writes)
        self._states.collect(writes)
        return attributes

    def dispatched(self) -> None:
        """Record that the last payload was sent: its new objects become mirrored, and the driver's values stale.

        A payload that is never dispatched has no effect; the next one contains the same changes again.
        """
        with self._lock:
            if self._pending is not None:
                self._mark_sent(self._pending)
                self._pending = None
            self._expire_parts()

    def expire(self) -> None:
        """Mark the driver's values as stale, from another thread than the program's, which may be fetching values."""
        held = self._lock.acquire(timeout=_HELD_S)  # a longer wait is one for this thread
        try:
            self._expire_parts()
        finally:
            if held:
                self._lock.release()

    def _expire_parts(self) -> None:
        for part in (self._variables, self._control, self._states):
            part.expire()

    def _mark_sent(self, payload: StepPayload) -> None:
        new, attributes = self._found
        self._found = [], {}
        self._adopt(new)
        self._control.mark_sent(attributes, with_new=bool(new))
        self._variables.mark_sent()
        self._states.mark_sent()
        self._functions.mark_sent(payload)
        for handle in self._table.take_released(len(payload.released)):
            for part in (self._variables, self._control, self._states):
                part.forget(handle)

    def _adopt(self, new: Sequence[tuple[int, Any]]) -> None:
        """Make objects mirrored, given with their handles."""
        for handle, obj in new:
            self._table.add(obj, handle)
        for handle, obj in new:
            if isinstance(obj, torch.Tensor):
                self._variables.add(obj, handle)
                attach_access(obj, _MirroredRows(self._link, handle, self._row_holders))
            else:
                self._control.add(obj, handle)
                self._states.add(obj, handle)
                self._classes.mirror(obj)

    def refresh(self) -> None:
        """Fetch everything that changed on the replicas. Blocks until the dispatched steps end."""
        with self._lock:
            attributes = [functools.partial(self._control.refresh, modules=modules) for modules in (True, False)]
            collect_errors([*attributes, self._variables.refresh, self._states.refresh])

    def divide_anew(self) -> None:
        """Fetch what differs between replicas (metrics, buffers); the next step divides it among all replicas. Blocks.

        For another number of replicas: a replica that leaves takes nothing with it.
        """
        with self._lock:
            self._variables.divide_anew()
            self._states.divide_anew()

    def export_tables(self) -> TableStates:
        """Return the rows of all embedding tables, with their parameters. Blocks; takes as much memory as the rows."""
        return [(each, access_to(each).export_rows(each)) for _, each in self._table.objects() if is_table(each)]

    def import_tables(self, rows: TableStates) -> None:
        """Divide the rows of tables among the replicas that there are now. Blocks."""
        for weight, states in rows:
            access_to(weight).import_rows(weight, states)

    @outside_inference_mode
    def reset(self, source: int = 0) -> None:
        """Copy the state of replica `source` to all replicas, after a step failed or a replica was replaced. Blocks."""
        with self._lock:
            state, held = self._link.call(source, MirrorCalls.dump)
            self._link.call_all(MirrorCalls.load, state)
            self._forget_others(held)

    @outside_inference_mode
    def forget_failed(self) -> None:
        """Send again what a failed step should have brought, after all replicas have started again. Blocks."""
        with self._lock:
            self._forget_others(self._link.call(0, MirrorCalls.handles))

    def _forget_others(self, held: Collection[int]) -> None:
        """Send functions again, and objects that the replicas do not hold."""
        self._pending = None
        self._functions.forget()
        for handle, obj in list(self._table.objects()):
            if handle not in held:  # the payload with it failed: the next step sends it again
                self._abandon(handle, obj)
        self.dispatched()

    def _abandon(self, handle: int, obj: Any) -> None:
        """Make an object plain again because no replica has it."""
        self._table.remove(handle)
        self._control.forget(handle)
        self._states.forget(handle)
        if isinstance(obj, torch.Tensor):
            self._variables.abandon(handle)
            attach_access(obj, None)
        else:
            self._classes.plain(obj)

    @property
    def is_behind(self) -> bool:
        """Return True if steps may have changed variables since the driver last fetched them."""
        return not self._released and not self._variables.is_fresh

    @outside_inference_mode
    def release(self, *, fetch: bool = True) -> None:
        """Make all objects plain again, with their final values or, without `fetch`, those fetched last. Idempotent.

        If fetching fails, the objects become plain all the same.
        """
        with self._lock:
            if self._released:
                return
            try:
                if fetch:
                    self.refresh()
            finally:
                self._released = True
                to_plain = [functools.partial(self._make_plain, obj) for _, obj in self._table.objects()]
                collect_errors([self._table.clear, self._variables.release, self._states.expire, *to_plain])

    def _make_plain(self, obj: Any) -> None:
        if isinstance(obj, torch.Tensor):
            attach_access(obj, _MirroredRows(None, 0, lambda: 1))
        else:
            self._classes.plain(obj)

    def before_read(self, obj: Any, name: str) -> None:
        """Fetch the values that reading attribute `name` of a mirrored object shows."""
        handle = self._table.handle_of(obj)
        if handle is not None:
            with self._lock:
                self._control.touch(obj, handle)
                self._states.before_read(obj, handle, name)
                if name in _READ_SEVERAL:
                    self._variables.want_all()

    def clear_gradients(self, obj: Any) -> None:
        """Set the gradients of a mirrored module or optimizer to None, on the replicas before their next step."""
        with self._lock:
            if self._table.handle_of(obj) is not None:
                self._variables.gradients.clear(obj)

    def before_write(self, obj: Any, name: str) -> None:
        """Prepare for the program setting or deleting attribute `name` of a mirrored object."""
        self.before_read(obj, name)
        handle = self._table.handle_of(obj)
        if handle is not None:
            with self._lock:
                self._control.overwrite(handle, name)

    def states_by_rank(self, metric: Any) -> list[dict[str, Any]]:
        """Return the states of a metric on each replica; empty if unknown. Blocks until dispatched steps end."""
        handle = self._table.handle_of(metric)
        with self._lock:
            return [] if handle is None or self._released else self._states.states_by_rank(metric, handle)

    def note_steps_elsewhere(self) -> None:
        """Mark optimizers as stepped (on the replicas), so that torch's schedulers on the driver do not warn."""
        with self._lock:
            for _, obj in self._table.objects():
                if isinstance(obj, torch.optim.Optimizer):
                    mark_as_stepped(obj)

    def _refresh_modules(self) -> None:
        with self._lock:
            if not self._released:
                self._control.refresh(modules=True)

    def _loads(self, data: bytes) -> Any:
        return loads(data, self._resolve)

    def _resolve(self, pid: PersistentId) -> Any:
        if pid[0] == "object":
            return self._table.object_of(pid[1])
        if pid[0] == "device":
            return "cpu"
        raise FailedPreconditionError(f"raydist bug: a replica sent the unknown persistent id {pid!r}.")

    def _require_open(self) -> None:
        if self._released:
            raise FailedPreconditionError(f"{self._name} must be open, it was closed. Create a new strategy.")


@final
class _MirroredRows:
    """The rows of one embedding table (a `RowAccess`), by calls to replicas after all dispatched steps.

    `link` is None once the strategy is closed: the rows are gone. `handle` is that of the table's parameter. `holders`
    returns the number of replicas that hold rows.
    """

    def __init__(self, link: ReplicaLink | None, handle: int, holders: Callable[[], int]) -> None:
        self._link = link
        self._handle = handle
        self._holders = holders

    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        spec, parts = spec_of(weight), self._ask(MirrorCalls.pull_rows, rows)
        if spec is None or len(parts) == 1:
            whole: torch.Tensor = parts[0]
            return whole
        found = torch.empty((len(rows), spec.dim), dtype=spec.dtype)
        owners = spec.servers_of(rows, len(parts))
        for rank, part in enumerate(parts):
            found[owners == rank] = part
        return found

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        return [state for states in self._ask(MirrorCalls.export_rows) for state in states]

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        self._ask(MirrorCalls.import_rows, states)

    def _ask(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the answers of the replicas that hold rows."""
        if self._link is None:
            raise FailedPreconditionError(
                "The rows of this embedding lay on parameter servers or replicas, and went with them when the strategy "
                "was closed. Save an rd.Checkpoint, or call export_rows(), before close(); restore it in the scope of "
                "a new strategy."
            )
        if self._holders() == 1:
            return [self._link.call(0, method, self._handle, *args)]
        return self._link.call_all(method, self._handle, *args)
