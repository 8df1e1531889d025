"""The replica side of mirroring: plain PyTorch objects under the handles that the driver gave them.

A step pays nothing for being mirrored. Between steps the driver sends what it changed (`apply`) and asks for what it
wants to read (the methods of `MirrorCalls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.checkpoints.object_state import STATES_BY_RANK
from raydist.checkpoints.shards import MergedStates
from raydist.collectives.reducer.parameter_hooks import ParameterHooks
from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.aggregation import Aggregation, aggregate
from raydist.mirroring.apply_update import ControlCollector, ReplicaBuffers, UpdateApplier
from raydist.mirroring.blueprints import Blueprints, Items, StateOfParts
from raydist.mirroring.function_cache import FunctionCache
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.lazy_states import (
    divide_states,
    hold_states,
    merge_states,
    metrics_in,
    restore_states,
    state_names,
    states_for_rank,
)
from raydist.mirroring.messages import MirrorCalls, StepPayload, TensorImage
from raydist.mirroring.replica_hooks import OptimizerLog, ParameterGuard, note_steps
from raydist.parameter_servers.local_rows import LocalRows, access_to, spec_of
from raydist.pickling.attribute_table import attributes
from raydist.pickling.pickler import PersistentId, dumps, loads
from raydist.utils.sharded_tensors import is_sharded, whole
from raydist.utils.stage_tensors import states_of_all

_CPU = torch.device("cpu")
_NO_ARGUMENTS = dumps(((), {}), lambda _: None)


@final
class InjectedObjects:
    """The objects that functions reference by name and each replica has by itself: strategy, iterators, saves.

    >>> found = InjectedObjects({"strategy": 1})
    >>> found.add("numbers", list)
    >>> found.value("strategy"), found.value("numbers"), found.drop("numbers"), found.drop("numbers")
    (1, [], [], None)
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._makers: dict[str, Callable[[], Any]] = {}

    def add(self, name: str, make: Callable[[], Any]) -> None:
        """Add a name; `make` creates the value on first use. An error of `make` reaches the user of the value."""
        self._makers[name] = make

    def drop(self, name: str) -> Any:
        """Remove a name; return the value, None if it was never used."""
        self._makers.pop(name, None)
        return self._values.pop(name, None)

    def value(self, name: str) -> Any:
        """Return the value of a name."""
        if name not in self._values:
            self._values[name] = self._makers[name]()
        return self._values[name]

    def holds(self, obj: Any) -> bool:
        """Return True if an object is one of the values."""
        return any(obj is known for known in self._values.values())


@final
class MirrorReplica(MirrorCalls):
    """The mirrored objects of one replica.

    `injected` has the objects by name that functions reference and every replica has by itself; for `carry_out` and
    `on_cleared` see `note_steps`, for `prepare` see `UpdateApplier`. A replica that `keeps_blueprints` can be copied
    although `prepare` shards modules.

    Attributes:
        injected: The objects by name that functions reference; more may be added.
        optimizer_log: The log of optimizer steps.
    """

    def __init__(
        self,
        rank: int,
        *,
        world_size: int = 1,
        device: str = "cpu",
        injected: Mapping[str, Any] | None = None,
        carry_out: Callable[..., Any] | None = None,
        on_cleared: Callable[[torch.optim.Optimizer], None] = lambda _: None,
        prepare: Callable[[Items], Items] = lambda items: items,
        keeps_blueprints: bool = False,
    ) -> None:
        self.rank = rank
        self._world_size = world_size
        self._carry_out = carry_out
        self._on_cleared = on_cleared
        self._prepare = prepare
        self._keeps_blueprints = keeps_blueprints
        self._device = device
        self.injected = InjectedObjects(injected or {})
        self._parts: Sequence[Any] = ()
        self._guard = ParameterGuard(lambda obj: self._table.handle_of(obj) is not None)
        self._functions = FunctionCache(self._loads, self._is_shared, rank)
        self._start_empty()

    def _start_empty(self) -> None:
        self._table = ReplicaTable()
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._parameters_at = -1
        self._control = ControlCollector(self._table, self._identify)
        self._buffers = ReplicaBuffers(self._table, self.rank, self._world_size)
        self.optimizer_log = OptimizerLog(self._table)
        self._applier = UpdateApplier(
            self._table,
            self._buffers,
            self._control,
            resolve=self._resolve,
            states_for_rank=lambda metric, states: states_for_rank(metric, states, self.rank, self._world_size),
            watch=lambda optimizer: note_steps(optimizer, self.optimizer_log.note, self._carry_out, self._on_cleared),
            prepare=self._prepare_new,
        )
        self._blueprints: Blueprints | None = None
        if self._keeps_blueprints:
            self._blueprints = Blueprints(self._table, self._identify, self._resolve, torch.device(self._device))

    def _prepare_new(self, items: Items) -> Items:
        if self._blueprints is not None:
            self._blueprints.note(items)
        return self._prepare(items)

    def apply(self, payload: StepPayload, parts: Sequence[Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Apply a payload; return the step's function, positional and keyword arguments.

        `parts` has this replica's part of every `PerReplica` leaf, in the order of `StepPayload.per_replica`.
        """
        if payload.released or payload.bundle or payload.writes or payload.forget:
            self._take_objects(payload)
        self._parts = parts
        try:
            function = self._functions.function_of(payload)
            given = payload.arguments
            args, kwargs = ((), {}) if given == _NO_ARGUMENTS else self._loads(given)
        finally:
            self._parts = ()
        return function, args, kwargs

    def take(self, payload: StepPayload) -> None:
        """Apply a payload without running its step: objects, writes, and the function."""
        self._take_objects(payload)
        if payload.function and payload.digest:
            self._functions.function_of(payload)

    def _take_objects(self, payload: StepPayload) -> None:
        self._applier.take(payload)
        if self._blueprints is not None and payload.bundle:
            self._blueprints.note_arrived()
        self._functions.forget(payload.forget)

    def guard(self) -> ParameterGuard:
        """Return the guard that, while it is on, refuses a parameter that is created in a mirrored module."""
        self._guard.hook()
        return self._guard

    def after_run(self) -> None:
        """Check the function of the last payload, which has run to its end, for changes of captured copies."""
        self._functions.after_run()

    def settle(self) -> None:
        """Give buffers that a step replaced the new values."""
        self._buffers.settle()

    def take_remarks(self) -> tuple[str, ...]:
        """Return the new warnings for the program, each once."""
        return self._functions.take_remarks()

    def take_loaded_states(self) -> frozenset[int]:
        """Return the handles of optimizers whose state the driver has replaced since the last call."""
        return self._applier.take_loaded_states()

    def items(self) -> list[tuple[int, Any]]:
        """Return handles and objects, in an order that is the same on all replicas."""
        return self._table.items()

    @property
    def num_gradients_set(self) -> int:
        """The number of gradients that the driver has set or cleared so far."""
        return self._applier.num_gradients_set

    @property
    def changes(self) -> int:
        """A number that changes when an object is added or released."""
        return self._table.changes

    def object_of(self, handle: int) -> Any:
        """Return the object of a handle."""
        return self._table.object_of(handle)

    def has(self, handle: int) -> bool:
        """Return True if there is an object with this handle."""
        return self._table.has(handle)

    def own_buffers(self) -> dict[int, torch.Tensor]:
        """Return the buffers that each replica computes from its own rows, by handle."""
        return self._buffers.own()

    def buffers(self) -> dict[int, torch.Tensor]:
        """Return all buffers, by handle."""
        return dict(self._buffers.items())

    def set_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Give each parameter the gradient under its handle, or None."""
        handles = (handle for handle, obj in self._table.items() if isinstance(obj, torch.nn.Parameter))
        self._applier.set_gradients({handle: gradients.get(handle) for handle in handles})

    def dump_for_newcomer(self) -> tuple[bytes | StateOfParts, dict[bytes, bytes]]:
        """Return the state of this replica, pickled or as parts, and the pickles of its step functions by digest."""
        if self._blueprints is None:
            return self.dump()[0], self._functions.pickles()
        self._buffers.settle()
        return self._blueprints.copy(), self._functions.pickles()

    def load_as_newcomer(self, state: bytes | StateOfParts, functions: Mapping[bytes, bytes]) -> None:
        """Load the result of another replica's `dump_for_newcomer`; parts are those of this rank's predecessor."""
        if isinstance(state, bytes):
            self.load(state)
        else:
            self._load_parts(state)
        self._functions.load(functions)

    def _load_parts(self, state: StateOfParts) -> None:
        self._start_empty()
        if self._blueprints is None:
            raise FailedPreconditionError("raydist bug: a replica without blueprints was given parts.")
        self._blueprints.load(state, self._add_from_blueprint)
        for handle in {handle for handle, _ in self._table.items()} - state.handles:
            self._table.release(handle)
            self._buffers.forget(handle)
        for handle, _ in self._table.items():
            self._buffers.note_places(handle)
        self._buffers.update_aggregations()
        self._functions.clear()

    def _add_from_blueprint(self, items: Items) -> None:
        self._applier.add(items, (), {})
        for handle, _ in items:
            self._control.mark_known(handle)

    def objects(self) -> list[Any]:
        """Return all mirrored objects, in an order that is the same on all replicas."""
        return [obj for _, obj in self._table.items()]

    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Return the parameters that replicas hold whole, in the same order on all; one tuple until they change."""
        if self._table.changes != self._parameters_at:
            self._parameters_at = self._table.changes
            parameters = [obj for obj in self.objects() if isinstance(obj, torch.nn.Parameter)]
            self._parameters = tuple(each for each in parameters if not is_sharded(each) and spec_of(each) is None)
        return self._parameters

    def export_buffers(self) -> list[torch.Tensor]:
        """Return copies of all mirrored buffers, in an order that is the same on all replicas."""
        return [buffer.detach().clone() for _, buffer in self._buffers.items()]

    def import_buffers(self, values: Sequence[torch.Tensor], own: Sequence[torch.Tensor] = ()) -> None:
        """Set buffers to another replica's `export_buffers()`, except where shares add up; see `take_over`."""
        self._buffers.take_over(values, own)

    @property
    def aggregates_buffers(self) -> bool:
        """True if the program chose an aggregation for a buffer; else there are no `written_buffers`."""
        return self._buffers.aggregations.are_chosen

    def written_buffers(self) -> list[tuple[torch.Tensor, str]]:
        """Return the buffers that replicas agree on after each batch, each with the rule; in the same order on all."""
        return self._buffers.written()

    def given_alike(self, objects: Iterable[Any]) -> None:
        """Keep this replica's share of buffers in objects whose state all replicas have set to the same values."""
        mine = {id(buffer) for obj in objects if isinstance(obj, torch.nn.Module) for buffer in obj.buffers()}
        self._buffers.arrived([handle for handle, buffer in self._buffers.items() if id(buffer) in mine])

    def merge_states(
        self,
        gather: Callable[[Any], list[Any]],
        objects: Mapping[str, Any],
        driver_items: Mapping[str, Mapping[str, int]],
    ) -> MergedStates:
        """Return the values that the driver would read of metrics, and of buffers that differ between replicas.

        All replicas call this at the same place, for the same objects; the driver would have to wait for the steps.
        `gather` returns every replica's value of its argument, in rank order; `driver_items` has the argument of
        :func:`~raydist.mirroring.lazy_states.merge_states` by name of the metric.
        """
        metrics = {name: obj for name, obj in metrics_in(objects).items() if name in objects or _is_saved_within(obj)}
        buffers = self._differing_buffers(objects)
        if not metrics and not buffers:
            return MergedStates()
        states = {name: hold_states(metric, _CPU) for name, metric in metrics.items()}
        values = [buffer.detach().to("cpu", copy=True) for buffer, _ in buffers]
        everyone = gather((states, values))
        by_rank = {name: [held[name] for held, _ in everyone] for name in metrics}
        merged = {
            name: merge_states(metric, by_rank[name], driver_items.get(name, {})) for name, metric in metrics.items()
        }
        kept = {name: {STATES_BY_RANK: each} if len(each) > 1 else {} for name, each in by_rank.items()}
        return MergedStates(
            {name: {**each, **kept[name]} for name, each in merged.items() if name in objects},
            nested=tuple((attributes(metrics[name]), each) for name, each in merged.items() if name not in objects),
            buffers=tuple(
                (buffer, aggregate([held[place] for _, held in everyone], how.aggregation))
                for place, (buffer, how) in enumerate(buffers)
            ),
        )

    def _differing_buffers(self, objects: Mapping[str, Any]) -> list[tuple[torch.Tensor, Aggregation]]:
        """Return the buffers in modules that the driver would gather, in an order that is the same on all replicas."""
        modules = [obj for obj in objects.values() if isinstance(obj, torch.nn.Module)]
        mine = {id(buffer) for module in modules for buffer in module.buffers()}
        if not mine:
            return []
        self._buffers.update_aggregations()
        found = [(buffer, self._buffers.aggregations.of(handle, buffer)) for handle, buffer in self._buffers.items()]
        return [(buffer, how) for buffer, how in found if id(buffer) in mine and how.is_gathered]

    def hold_metrics(self) -> dict[int, dict[str, Any]]:
        """Return copies of the states of all metrics, for `restore_metrics` after a step that must not count."""
        return {handle: hold_states(metric) for handle, metric in self._table.items() if state_names(metric)}

    def restore_metrics(self, held: dict[int, dict[str, Any]]) -> None:
        """Set the states of metrics to the result of `hold_metrics`."""
        for handle, states in held.items():
            restore_states(self._table.object_of(handle), states)

    def collect_control(self, modules: bool) -> bytes:
        self._buffers.settle()
        return self._control.collect(modules=modules)

    def tensor_images(self, handles: Sequence[int]) -> dict[int, TensorImage]:
        self._buffers.settle()
        held = {handle: self._table.object_of(handle) for handle in handles if self._table.has(handle)}
        found = {handle: TensorImage.of(each) for handle, each in held.items()}
        # All replicas take part in reading sharded tensors, but the driver needs them once.
        return {} if self.rank and any(map(is_sharded, held.values())) else found

    def collect_gradients(self) -> dict[int, TensorImage]:
        parameters = [(handle, obj) for handle, obj in self._table.items() if isinstance(obj, torch.nn.Parameter)]
        handles = {obj: handle for handle, obj in parameters}
        held = states_of_all(
            handles, {obj: {"grad": each} for obj in handles if (each := _gradient_of(obj)) is not None}
        )
        found = {handles[obj]: TensorImage.of(each["grad"]) for obj, each in held.items()}
        return {} if self.rank and any(is_sharded(obj) for _, obj in parameters) else found

    def collect_optimizer_state(self, handle: int) -> bytes:
        optimizer = attributes(self._table.object_of(handle))
        parameters = [parameter for group in optimizer["param_groups"] for parameter in group["params"]]
        state = states_of_all(parameters, optimizer["state"])
        if not any(map(is_sharded, state)):
            return dumps(state, self._identify)
        found = {parameter: {key: whole(value) for key, value in held.items()} for parameter, held in state.items()}
        return dumps({} if self.rank else found, self._identify)

    def collect_metrics(self) -> bytes:
        return dumps(self.hold_metrics(), self._identify)

    def tell_everything(self) -> None:
        """Make the next `collect_control` contain everything, for a driver that has asked another replica so far."""
        self._control.forget_known()

    def pull_rows(self, handle: int, rows: torch.Tensor) -> torch.Tensor:
        weight = self._table.object_of(handle)
        access = access_to(weight)
        if isinstance(access, LocalRows):  # the driver asks all replicas for those that they hold
            return access.table.pull(rows[access.table.own(rows)])
        return access.pull(weight, rows)

    def export_rows(self, handle: int) -> list[dict[str, Any]]:
        weight = self._table.object_of(handle)
        return access_to(weight).export_rows(weight)

    def import_rows(self, handle: int, states: Sequence[Mapping[str, Any]]) -> None:
        weight = self._table.object_of(handle)
        access_to(weight).import_rows(weight, states)

    def dump(self) -> tuple[bytes, frozenset[int]]:
        self._buffers.settle()
        items = self._table.items()
        parameters = [(handle, obj) for handle, obj in items if isinstance(obj, torch.nn.Parameter)]
        hooks = [(handle, found) for handle, obj in parameters if (found := ParameterHooks.of(obj))]
        gradients = {handle: each for handle, obj in parameters if (each := _gradient_of(obj)) is not None}
        state = dumps((items, hooks, gradients), lambda _: None, to_replica=True)
        return state, self.handles()

    def handles(self) -> frozenset[int]:
        return frozenset(handle for handle, _ in self._table.items())

    def load(self, state: bytes) -> None:
        metrics = self.hold_metrics()
        statistics = {handle: each.detach().clone() for handle, each in self.own_buffers().items()}
        self._start_empty()
        items, hooks, gradients = self._loads(state)
        self._applier.add(items, hooks, gradients)
        self._buffers.update_aggregations()
        for handle, obj in items:
            if isinstance(obj, torch.Tensor):
                self._buffers.restore_own(handle, statistics)
            elif state_names(obj):
                # The other replica keeps what it counted.
                restore_states(obj, metrics.get(handle) or divide_states(obj)[1])
        self._functions.clear()  # they refer to the objects of before; the driver sends them again

    def _is_shared(self, obj: Any) -> bool:
        """Return True if `obj` is a mirrored or injected object, not a copy."""
        return self._table.handle_of(obj) is not None or self.injected.holds(obj)

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
            case ("injected", name):
                return self.injected.value(name)
        raise FailedPreconditionError(f"raydist bug: a replica was sent the unknown persistent id {pid!r}.")


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that all replicas have alike; None for the rows of a table, of which each has others."""
    return None if spec_of(parameter) is not None else parameter.grad


def _is_saved_within(metric: Any) -> bool:
    """Return True if a module's `state_dict` contains states of the metric, which is so only for persistent states."""
    return any(attributes(metric)["_persistent"].values())
