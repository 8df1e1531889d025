"""The driver half of mirroring: the user's objects, and what the replicas must be sent before each step.

Nothing happens to an object until a step reaches it. Then it is shipped, once, and becomes *mirrored* in place: it
stays the object that the program holds, but reads of it fetch the replicas' present values and writes are found before
the next step. A program that only runs steps pays for pickling its function, and for nothing per parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, final

import torch
from torch.nn.parameter import is_lazy

from raydist.checkpoints.sharing.started_save import ShareSaver
from raydist.compat.torch_internals import buffer_table, mark_as_stepped
from raydist.errors import FailedPreconditionError
from raydist.mirroring.argument_forms import ArgumentForms
from raydist.mirroring.aspects import Aspects
from raydist.mirroring.attributes import ControlState
from raydist.mirroring.calls import MirrorCalls, ReplicaLink
from raydist.mirroring.discovery import Discovery
from raydist.mirroring.gradients import clearing
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.lazy_states import LazyStates
from raydist.mirroring.metric_states import metrics_in
from raydist.mirroring.objects import MirroredClasses
from raydist.mirroring.origin import Origin
from raydist.mirroring.parts import held_parameters, modules_of
from raydist.mirroring.scope import Scope
from raydist.mirroring.shipment import Shipment, Writes
from raydist.mirroring.step_functions import StepFunctions
from raydist.mirroring.variables import Variables
from raydist.pickling.attribute_table import AttributeTable
from raydist.pickling.pickler import PersistentId, loads
from raydist.torch_modes import outside_inference_mode

__all__ = ["MirrorDriver"]

_READ_SEVERAL = {
    *("forward", "state_dict", "parameters", "named_parameters", "buffers", "named_buffers", "param_groups"),
    *("__deepcopy__", "__reduce_ex__"),
}
"""Attributes of modules and optimizers through which a program reads more than one tensor."""


@final
class MirrorDriver:
    """The mirrored objects of one strategy.

    Args:
        name: The strategy, for messages.
        link: The way to its replicas.
        devices: Kinds of devices that its replicas have.
        serves_rows: Rows of embedding tables may lie with it.
    """

    def __init__(
        self,
        name: str,
        link: ReplicaLink,
        devices: Callable[[], Collection[str]] = lambda: ("cpu",),
        *,
        serves_rows: bool = False,
    ) -> None:
        self._name = name
        self._link = link
        self._lock = threading.RLock()
        self._scope = Scope()
        self._table = DriverTable()
        self._origin = Origin(name, self._scope, devices, self.is_mirrored, self._mirrored, serves_rows=serves_rows)
        self._variables = Variables(link, self._table, self._scope, self._origin, self._refresh_modules)
        self._control = ControlState(link, self._table, loads=self._loads, set_flag=self._variables.set_flag)
        self._states = LazyStates(link, self._table, loads=self._loads)
        self._aspects = Aspects(link, self._table, MirroredClasses(self), self._control, self._variables, self._states)
        self._functions = StepFunctions()
        self._forms = ArgumentForms()
        self._pending: Shipment | None = None
        self._found: tuple[list[tuple[int, Any]], dict[int, AttributeTable]] = [], {}
        self._released = False
        self.share_saver: ShareSaver | None = None
        """How replicas save what they hold; None where the driver reads it."""

    def how_saved(self, obj: Any) -> Literal["divided", "whole"]:
        """Whether all replicas save a part of an object, or the first one all of it."""
        if not isinstance(obj, torch.nn.Module):
            return "divided"
        if self.has_metrics(obj):
            return "whole"
        buffers = (buffer_table(part).values() for part in modules_of(obj))
        return "whole" if any(buffer is not None for held in buffers for buffer in held) else "divided"

    def items_alone(self, objects: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        """By name of a metric, how many items of its lists the first replica has from here with the next shipment."""
        with self._lock:
            metrics = metrics_in(objects)
            return {name: self._states.alone(obj, self._table.handle_of(obj)) for name, obj in metrics.items()}

    def handle_of(self, obj: Any) -> int | None:
        """What replicas know an object by, or will once the last shipment is there; None for what is the driver's."""
        known = self._table.handle_of(obj)
        return next((handle for handle, new in self._found[0] if new is obj), None) if known is None else known

    def has_metrics(self, obj: Any) -> bool:
        """Whether it is a metric, or a module with some in it. Waits for nothing."""
        return bool(metrics_in({"": obj}))

    def holds(self, obj: Any) -> bool:
        """Whether replicas have a module or an optimizer, or can be sent it: it was made here. Waits for nothing."""
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
        """Whether replicas have it already."""
        return self._table.handle_of(obj) is not None

    def _mirrored(self) -> list[Any]:
        return [obj for _, obj in self._table.objects()]

    def has_made(self, obj: Any) -> bool:
        """Whether a module or a variable was made under the scope. Waits for nothing."""
        return obj in self._scope

    def scope(self, adopt: Callable[[Any], None] | None = None) -> AbstractContextManager[None]:
        """Note what is created in the block as created under this strategy; `adopt` is called with each object."""
        self._require_open()
        return self._scope.enter(adopt)

    @outside_inference_mode
    def prepare(
        self,
        fn: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        externals: Mapping[str, Any] | None = None,
        carried: Sequence[Any] = (),
    ) -> Shipment:
        """Everything that one step needs on the replicas and that they do not have.

        The shipment must be applied by every replica, in the order of the calls; if it cannot be, call :meth:`reset`.
        Waits for dispatched steps only where the driver changed something without having read it.

        Args:
            fn: The step function.
            args: Its positional arguments; `PerReplica` leaves become placeholders.
            kwargs: Its keyword arguments.
            externals: Objects that every replica has by itself, under the names given to `MirrorReplica`.
            carried: Modules that replicas are to have whether the step reaches them or not.

        Raises:
            FailedPreconditionError: Something reached was not made under this strategy's scope, belongs to another
                strategy, cannot be pickled, or was changed by the last step and on the driver too.
        """
        with self._lock:
            self._require_open()
            discovery = Discovery(self._table, self._scope, self._origin, externals or {})
            function, digest = self._functions.pickle(discovery, fn)
            arguments = self._forms.pickled(discovery, args, kwargs or {})
            for each in carried:
                if not self.is_mirrored(each):
                    discovery.pickle(each, "what all steps have")
            released = self._table.released  # what goes from here on may be among the writes: it goes with the next one
            writes = Writes()
            states = self._aspects.collect(writes)
            discovery.adopt_buffers(writes)
            shipment = Shipment(
                released=released,
                writes=discovery.pickle(writes, "what the driver changed") if writes else b"",
                bundle=discovery.bundle(),
                function=function,
                digest=digest,
                forget=self._functions.too_many(digest),
                arguments=arguments,
                per_replica=tuple(discovery.per_replica),
            )
            self._pending = shipment.knowing(writes)
            self._found = discovery.new, states
            return self._pending

    def dispatched(self) -> None:
        """The last shipment is on its way: what is new is mirrored now, and what the driver holds is stale.

        A shipment that is not dispatched leaves no trace; the next one holds the same again.
        """
        with self._lock:
            if self._pending is not None:
                self._mark_sent(self._pending)
                self._pending = None
            self._aspects.expire()

    def _mark_sent(self, shipment: Shipment) -> None:
        new, states = self._found
        self._found = [], {}
        self._aspects.adopt(new)
        self._aspects.mark_sent(states, with_new=bool(new))
        self._functions.mark_sent(shipment)
        for handle in self._table.take_released(len(shipment.released)):
            self._aspects.forget(handle)

    def refresh(self) -> None:
        """Fetch everything that changed on the replicas, after the dispatched steps."""
        with self._lock:
            self._aspects.refresh()

    @outside_inference_mode
    def reset(self, source: int = 0) -> None:
        """Give every replica the state of one of them, after a step failed half way or a replica was replaced."""
        with self._lock:
            state, held = self._link.call(source, MirrorCalls.dump)
            self._link.call_all(MirrorCalls.load, state)
            self._pending = None
            self._functions.forget()
            for handle, obj in list(self._table.objects()):
                if handle not in held:  # its shipment was the one that failed: it will be found again
                    self._aspects.abandon(handle, obj)
            self.dispatched()

    @property
    def is_behind(self) -> bool:
        """Whether replicas may have changed variables since their values were read."""
        return not self._released and not self._variables.is_fresh

    @outside_inference_mode
    def release(self, *, fetch: bool = True) -> None:
        """Make everything plain again, also what could not be fetched. May be called twice.

        Args:
            fetch: Fetch the final values first; False leaves the values that were read last.
        """
        with self._lock:
            if self._released:
                return
            try:
                if fetch:
                    self.refresh()
            finally:
                self._released = True
                self._aspects.make_plain()

    def before_read(self, obj: Any, name: str) -> None:
        """An attribute of a mirrored object is about to be read."""
        handle = self._table.handle_of(obj)
        if handle is not None:
            with self._lock:
                self._control.touch(obj, handle)
                self._states.before_read(obj, handle, name)
                if name in _READ_SEVERAL:
                    self._variables.want_all()

    def zero_grad_of(self, obj: Any, method: Any) -> Any:
        """What the program gets where it reads this method of a mirrored object."""
        return clearing(obj, method)

    def clear_gradients(self, obj: Any) -> None:
        """Set the gradients of a mirrored module or optimizer to None, on the replicas too, before its next step."""
        with self._lock:
            if self._table.handle_of(obj) is not None:
                self._variables.gradients.clear(obj)

    def before_write(self, obj: Any, name: str) -> None:
        """An attribute of a mirrored object is about to be set or deleted."""
        self.before_read(obj, name)
        handle = self._table.handle_of(obj)
        if handle is not None:
            with self._lock:
                self._control.overwrite(handle, name)

    def metric_shares(self, metric: Any) -> list[dict[str, Any]]:
        """The states of a metric on each replica; none where they are not known. Waits for dispatched steps."""
        handle = self._table.handle_of(metric)
        with self._lock:
            return [] if handle is None or self._released else self._states.shares(metric, handle)

    def note_steps_elsewhere(self) -> None:
        """Optimizers have stepped where nobody asks: torch's schedulers need not warn that they have not."""
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
