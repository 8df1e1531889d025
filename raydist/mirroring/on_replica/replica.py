"""The replica half of mirroring: plain PyTorch objects under the handles that the driver gave them.

A step pays nothing for being mirrored. Between steps the driver sends what it changed (`apply`) and asks for what it
wants to read (`collect_*`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.checkpoints.saved_kinds import SHARES
from raydist.checkpoints.sharing.share_writer import MergedStates
from raydist.collectives.reducer.parameter_hooks import ParameterHooks
from raydist.errors import FailedPreconditionError
from raydist.mirroring.aggregation import Aggregation, aggregate
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.messages import MirrorCalls, Shipment, TensorImage
from raydist.mirroring.metric_states import (
    divide_states,
    hold_states,
    merge_states,
    metrics_in,
    restore_states,
    share_of_states,
    state_names,
)
from raydist.mirroring.on_replica.apply_update import Arrivals, ControlCollector
from raydist.mirroring.on_replica.buffers import ReplicaBuffers
from raydist.mirroring.on_replica.hooks import ParameterGuard, UpdateLog, note_steps
from raydist.mirroring.on_replica.step_functions import SentFunctions
from raydist.parameter_servers.rows.local_rows import access_to
from raydist.pickling.attribute_table import attributes
from raydist.pickling.pickler import PersistentId, dumps, loads

__all__ = ["Externals", "MirrorReplica", "StateMerger"]


@final
class Externals:
    """Values by name, made when they are first reached.

    Args:
        values: Those that are there.

    >>> found = Externals({"strategy": 1})
    >>> found.add("numbers", list)
    >>> found.value("strategy"), found.value("numbers"), found.drop("numbers"), found.drop("numbers")
    (1, [], [], None)
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._makers: dict[str, Callable[[], Any]] = {}

    def add(self, name: str, make: Callable[[], Any]) -> None:
        """Something may be reached by this name from now on.

        Args:
            name: Of the value.
            make: Makes it, when it is first reached. What this raises, whoever reaches it raises.
        """
        self._makers[name] = make

    def drop(self, name: str) -> Any:
        """Nothing will be reached by this name any more; the value, None where it was never reached."""
        self._makers.pop(name, None)
        return self._values.pop(name, None)

    def value(self, name: str) -> Any:
        """The value of this name."""
        if name not in self._values:
            self._values[name] = self._makers[name]()
        return self._values[name]

    def holds(self, obj: Any) -> bool:
        """Return True if an object is one of the values."""
        return any(obj is known for known in self._values.values())


_CPU = torch.device("cpu")


@final
class StateMerger:
    """One replica's end; all replicas call it at the same place, for the same objects.

    Args:
        buffers: The replica's.
        gather: Every replica's value of its argument, in the order of ranks.
    """

    def __init__(self, buffers: ReplicaBuffers, gather: Callable[[Any], list[Any]]) -> None:
        self._buffers = buffers
        self._gather = gather

    def __call__(self, objects: Mapping[str, Any], alone: Mapping[str, Mapping[str, int]]) -> MergedStates:
        """Return the values that the driver would read of metrics, and of buffers that differ.

        Args:
            objects: Objects by name.
            alone: By name of a metric, see `merge_states`.
        """
        metrics = {name: obj for name, obj in metrics_in(objects).items() if name in objects or _is_saved_within(obj)}
        buffers = self._differing(objects) if any(isinstance(obj, torch.nn.Module) for obj in objects.values()) else []
        if not metrics and not buffers:
            return MergedStates()
        states = {name: hold_states(metric, _CPU) for name, metric in metrics.items()}
        values = [buffer.detach().to("cpu", copy=True) for buffer, _ in buffers]
        everyone = self._gather((states, values))
        shares = {name: [held[name] for held, _ in everyone] for name in metrics}
        merged = {name: merge_states(metric, shares[name], alone.get(name, {})) for name, metric in metrics.items()}
        return MergedStates(
            {name: {**each, **_shares(shares[name])} for name, each in merged.items() if name in objects},
            nested=tuple((attributes(metrics[name]), each) for name, each in merged.items() if name not in objects),
            buffers=tuple(
                (buffer, aggregate([held[place] for _, held in everyone], how.aggregation))
                for place, (buffer, how) in enumerate(buffers)
            ),
        )

    def _differing(self, objects: Mapping[str, Any]) -> list[tuple[torch.Tensor, Aggregation]]:
        """Buffers in these objects that the driver would gather, in an order that is the same on all replicas."""
        modules = [obj for obj in objects.values() if isinstance(obj, torch.nn.Module)]
        mine = {id(buffer) for module in modules for buffer in module.buffers()}
        self._buffers.look()
        found = [(buffer, self._buffers.aggregations.of(handle, buffer)) for handle, buffer in self._buffers.items()]
        return [(buffer, how) for buffer, how in found if id(buffer) in mine and how.is_gathered]


def _is_saved_within(metric: Any) -> bool:
    """Return True if a module's `state_dict` contains states of the metric, which is so only for persistent states."""
    return any(attributes(metric)["_persistent"].values())


def _shares(shares: list[dict[str, Any]]) -> dict[str, Any]:
    return {SHARES: shares} if len(shares) > 1 else {}


_NO_ARGUMENTS = dumps(((), {}), lambda _: None)


@final
class MirrorReplica(MirrorCalls):
    """The mirrored objects of one replica.

    Args:
        rank: The replica's number.
        world_size: All replicas.
        device: Where mirrored tensors live.
        externals: What functions may reach that every replica has by itself, by name.
        carry_out: How steps of optimizers are carried out; see `note_steps`.
        on_cleared: Called with an optimizer after its `zero_grad`.

    Attributes:
        externals: The same, for functions that are sent from now on.
        updates: What its optimizers have done.
    """

    def __init__(
        self,
        rank: int,
        *,
        world_size: int = 1,
        device: str = "cpu",
        externals: Mapping[str, Any] | None = None,
        carry_out: Callable[..., Any] | None = None,
        on_cleared: Callable[[torch.optim.Optimizer], None] = lambda _: None,
    ) -> None:
        self.rank = rank
        self._world_size = world_size
        self._carry_out = carry_out
        self._on_cleared = on_cleared
        self._device = device
        self.externals = Externals(externals or {})
        self._parts: Sequence[Any] = ()
        self._guard = ParameterGuard(lambda obj: self._table.handle_of(obj) is not None)
        self._functions = SentFunctions(self._loads, self._is_shared, rank)
        self._start_empty()

    def _start_empty(self) -> None:
        self._table = ReplicaTable()
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._parameters_at = -1
        self._control = ControlCollector(self._table, self._identify)
        self._buffers = ReplicaBuffers(self._table, self.rank, self._world_size)
        self.updates = UpdateLog(self._table)
        self._arrivals = Arrivals(
            self._table,
            self._buffers,
            self._control,
            resolve=self._resolve,
            share=lambda metric, states: share_of_states(metric, states, self.rank, self._world_size),
            watch=lambda optimizer: note_steps(optimizer, self.updates.note, self._carry_out, self._on_cleared),
        )

    def apply(self, shipment: Shipment, parts: Sequence[Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Take in a shipment; the step's function, positional and keyword arguments.

        Args:
            shipment: What the driver prepared.
            parts: This replica's part of every `PerReplica` leaf, in the order of `Shipment.per_replica`.
        """
        if shipment.released or shipment.bundle or shipment.writes or shipment.forget:
            self._take_objects(shipment)
        self._parts = parts
        try:
            function = self._functions.function_of(shipment)
            given = shipment.arguments
            args, kwargs = ((), {}) if given == _NO_ARGUMENTS else self._loads(given)
        finally:
            self._parts = ()
        return function, args, kwargs

    def take(self, shipment: Shipment) -> None:
        """Take in what a shipment brings beside arguments, without a step: objects, what was written, a function."""
        self._take_objects(shipment)
        if shipment.function and shipment.digest:
            self._functions.function_of(shipment)

    def _take_objects(self, shipment: Shipment) -> None:
        self._arrivals.take(shipment)
        self._functions.forget(shipment.forget)

    def guard(self) -> ParameterGuard:
        """While it is on, a parameter created in a mirrored module is an error."""
        self._guard.hook()
        return self._guard

    def after_run(self) -> None:
        """The function of the shipment that was applied last has run to its end: changed copies are noted."""
        self._functions.after_run()

    def settle(self) -> None:
        """See that what a step has put into places of mirrored objects is what these hold."""
        self._buffers.places.settle()

    def take_remarks(self) -> tuple[str, ...]:
        """Return the new warnings for the program, each once."""
        return self._functions.take_remarks()

    def take_loaded_states(self) -> frozenset[int]:
        """Handles of optimizers whose state the driver has replaced since this was asked last."""
        return self._arrivals.take_loaded_states()

    def items(self) -> list[tuple[int, Any]]:
        """Handles and objects of everything that is mirrored, in an order that is the same on all replicas."""
        return self._table.items()

    @property
    def num_gradients_set(self) -> int:
        """Gradients that the driver has set or cleared so far."""
        return self._arrivals.num_gradients_set

    @property
    def changes(self) -> int:
        """Another number once objects have come or gone."""
        return self._table.changes

    def object_of(self, handle: int) -> Any:
        """Return the object of a handle."""
        return self._table.object_of(handle)

    def objects(self) -> list[Any]:
        """Everything that is mirrored, in an order that is the same on all replicas."""
        return [obj for _, obj in self._table.items()]

    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Every mirrored parameter, in an order that is the same on all replicas; one tuple until that changes."""
        if self._table.changes != self._parameters_at:
            self._parameters_at = self._table.changes
            self._parameters = tuple(obj for _, obj in self._table.items() if isinstance(obj, torch.nn.Parameter))
        return self._parameters

    def export_buffers(self) -> list[torch.Tensor]:
        """Copies of every mirrored buffer, in an order that is the same on all replicas."""
        return self._buffers.copies()

    def import_buffers(self, values: Sequence[torch.Tensor], own: Sequence[torch.Tensor] = ()) -> None:
        """Take another replica's `export_buffers()`, but what this one had where shares add up; see `take_over`."""
        self._buffers.take_over(values, own)

    @property
    def aggregates_buffers(self) -> bool:
        """Return True if the program chose an aggregation for a buffer; else there are no `written_buffers`."""
        return self._buffers.aggregations.are_chosen

    def written_buffers(self) -> list[tuple[torch.Tensor, str]]:
        """The buffers that replicas agree on after each batch, and how; in an order that is the same on all."""
        return self._buffers.written()

    def given_alike(self, objects: Iterable[Any]) -> None:
        """All replicas have given these the same states: of buffers whose shares add up, keep this replica's."""
        mine = {id(buffer) for obj in objects if isinstance(obj, torch.nn.Module) for buffer in obj.buffers()}
        self._buffers.arrived([handle for handle, buffer in self._buffers.items() if id(buffer) in mine])

    def merger(self, gather: Callable[[Any], list[Any]]) -> StateMerger:
        """Merges what replicas hold apart; see there."""
        return StateMerger(self._buffers, gather)

    def hold_metrics(self) -> dict[int, dict[str, Any]]:
        """The states of every metric, to be given to `restore_metrics` after a step that must not count."""
        return {handle: hold_states(metric) for handle, metric in self._table.items() if state_names(metric)}

    def restore_metrics(self, held: dict[int, dict[str, Any]]) -> None:
        """Put back what `hold_metrics` gave."""
        for handle, states in held.items():
            restore_states(self._table.object_of(handle), states)

    def collect_control(self, modules: bool) -> bytes:
        self._buffers.places.settle()
        return self._control.collect(modules=modules)

    def tensor_images(self, handles: Sequence[int]) -> dict[int, TensorImage]:
        self._buffers.places.settle()
        return {handle: TensorImage.of(self._table.object_of(handle)) for handle in handles if self._table.has(handle)}

    def collect_gradients(self) -> dict[int, TensorImage]:
        parameters = [(handle, obj) for handle, obj in self._table.items() if isinstance(obj, torch.nn.Parameter)]
        return {handle: TensorImage.of(obj.grad) for handle, obj in parameters if obj.grad is not None}

    def collect_optimizer_state(self, handle: int) -> bytes:
        return dumps(dict(attributes(self._table.object_of(handle))["state"]), self._identify)

    def collect_metrics(self) -> bytes:
        return dumps(self.hold_metrics(), self._identify)

    def tell_everything(self) -> None:
        """Take all that the driver may ask for as news to it."""
        self._control.forget_known()

    def pull_rows(self, handle: int, rows: torch.Tensor) -> torch.Tensor:
        weight = self._table.object_of(handle)
        return access_to(weight).pull(weight, rows)

    def export_rows(self, handle: int) -> list[dict[str, Any]]:
        weight = self._table.object_of(handle)
        return access_to(weight).export_rows(weight)

    def import_rows(self, handle: int, states: Sequence[Mapping[str, Any]]) -> None:
        weight = self._table.object_of(handle)
        access_to(weight).import_rows(weight, states)

    def dump(self) -> tuple[bytes, frozenset[int]]:
        self._buffers.places.settle()
        items = self._table.items()
        parameters = [(handle, obj) for handle, obj in items if isinstance(obj, torch.nn.Parameter)]
        hooks = [(handle, found) for handle, obj in parameters if (found := ParameterHooks.of(obj))]
        gradients = {handle: obj.grad for handle, obj in parameters if obj.grad is not None}
        state = dumps((items, hooks, gradients), lambda _: None, to_replica=True)
        return state, frozenset(handle for handle, _ in items)

    def load(self, state: bytes) -> None:
        self._buffers.places.settle()
        metrics, statistics = self.hold_metrics(), self._buffers.own_values()
        self._start_empty()
        items, hooks, gradients = self._loads(state)
        self._arrivals.add(items)
        self._buffers.look()
        self._arrivals.add_hooks(hooks)
        self._arrivals.set_gradients(gradients)
        for handle, obj in items:
            if isinstance(obj, torch.Tensor):
                self._buffers.restore_own(handle, statistics)
            elif state_names(obj):
                # What the other one counted is counted there.
                restore_states(obj, metrics.get(handle) or divide_states(obj)[1])
        self._functions.clear()  # they refer to the objects of before; the driver sends them again

    def _is_shared(self, obj: Any) -> bool:
        """Return True if `obj` is a mirrored or external object, not a copy."""
        return self._table.handle_of(obj) is not None or self.externals.holds(obj)

    def _identify(self, obj: Any) -> PersistentId | None:
        handle = self._table.handle_of(obj)
        return None if handle is None else ("object", handle)

    def _loads(self, data: bytes) -> Any:
        return loads(data, self._resolve)

    def _resolve(self, pid: PersistentId) -> Any:
        match pid:
            case ("object", handle):
                return self._table.object_of(handle)
            case ("part", index):
                return self._parts[index]
            case ("device",):
                return self._device
            case ("external", name):
                return self.externals.value(name)
        raise FailedPreconditionError(f"raydist bug: a replica was sent the unknown persistent id {pid!r}.")
