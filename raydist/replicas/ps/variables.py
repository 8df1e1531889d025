"""The worker's side of variables that live on parameter servers.

Before a closure runs, the worker pulls the parameters whose held versions are too old. `optimizer.step()` pushes the
present `.grad`; the servers do the step itself, and their answer contains the new parameters. Values that the function
writes by hand are assigned when an optimizer steps and when the closure ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, final, get_args

import torch

from raydist.checkpoints.ps_restore import HandledRestore, PsRestores
from raydist.checkpoints.ps_save import PsSaves
from raydist.checkpoints.restore import describe_differences
from raydist.compat.torch_internals import disable_compiler
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.parameter_servers.client import PlacedVariables, PsRows, ServerClient
from raydist.parameter_servers.connection import ServerConnection
from raydist.parameter_servers.consistency import Consistency, SyncWithBackups
from raydist.parameter_servers.local_rows import reading_rows, spec_of, take_held_rows
from raydist.parameter_servers.optimizers import require_elementwise
from raydist.parameter_servers.requests import Arrive, BeginClosure, EndClosure, PushKey, Sender
from raydist.parameter_servers.slices import PsSlice, VariableSpec
from raydist.replicas.ps.optimizer_states import ClosureStates
from raydist.replicas.ps.optimizers import KnownObjects, PsOptimizers
from raydist.replicas.ps.work_message import ClosureLabel
from raydist.replicas.ps.worker_runner import WorkerRules
from raydist.replicas.ps.worker_slices import WorkerSlices
from raydist.replicas.rules import VariablesView


def names_of_variables(objects: Iterable[Any]) -> dict[int, str]:
    """Return the names of variables by identity, as in the outermost module that has them.

    >>> layer = torch.nn.Linear(1, 1)
    >>> names_of_variables([layer, torch.nn.Sequential(layer)])[id(layer.bias)]
    '0.bias'
    """
    names: dict[int, str] = {}
    modules = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    for module in [each for each in modules if id(each) not in inner]:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            names.setdefault(id(tensor), name)
    return names


def require_servable(tensors: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
    """Check that variables are dense, have values, and share no memory."""
    for handle, tensor in tensors.items():
        _require_dense(names.get(id(tensor), f"variable {handle}"), tensor)
    _require_apart(tensors, names)


def _require_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise InvalidArgumentError(
            f"Variables must be dense tensors with values to live on parameter servers, but {name} is of layout "
            f"{tensor.layout} on {tensor.device}. Keep it out of the scope, or store it as dense tensors."
        )


def _require_apart(tensors: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
    """Reject variables that share memory: on the servers each variable has values of its own."""
    held = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), id(tensor))
        for tensor in tensors.values()
        if tensor.numel()
    )
    for (_, end, one), (begin, _, other) in zip(held, held[1:], strict=False):
        if begin < end:
            raise InvalidArgumentError(
                f"Each variable must have memory of its own to live on parameter servers, but "
                f"{names.get(one, 'a variable')} and {names.get(other, 'another one')} overlap. Use one tensor in both "
                "places, or copy one of them."
            )


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    spanned = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (spanned + 1) * tensor.dtype.itemsize


@final
class PsModel:
    """All variables, optimizers and tables of one worker."""

    def __init__(self, client: ServerClient) -> None:
        self._known = KnownObjects()
        self._tables: set[int] = set()
        self.slices = WorkerSlices(client)  # slices of the variables, and the values that the worker has read
        self.optimizers = PsOptimizers(client, self._known, self.slices, self._tables)  # the worker's optimizers
        self.states = ClosureStates(self.optimizers)  # states of the optimizers, for closures
        self.rows = PsRows(client, self._known.handle_of)  # rows of the embedding tables
        # placement of all of these, for saving and restoring
        self.placed = PlacedVariables(
            client, self.slices.table, self._known.get, self._known.handle_of, self.optimizers.read_states
        )

    def look(self, variables: VariablesView) -> None:
        """Follow objects that were added or removed."""
        if self._known.look(variables):
            self.optimizers.forget_members()
            for handle in [known for known in self.slices.table if known not in self._known]:
                self.slices.forget(handle)

    def settle(self, variables: VariablesView) -> tuple[VariableSpec, ...]:
        """Describe the variables that have no slices yet."""
        self.look(variables)
        for optimizer in variables.optimizers():
            if not self.optimizers.is_told(optimizer):
                require_elementwise(optimizer)
        new = {
            handle: tensor
            for handle, tensor in self._known.tensors()
            if handle not in self.slices.table and spec_of(tensor) is None
        }
        names = names_of_variables(self._known.objects())
        require_servable(new, names)
        return tuple(
            VariableSpec(
                handle,
                names.get(id(tensor), f"variable_{handle}"),
                tuple(tensor.shape),
                tensor.dtype,
                partitioned=isinstance(tensor, torch.nn.Parameter),
            )
            for handle, tensor in new.items()
        )

    def place(self, variables: VariablesView, slices: Sequence[PsSlice]) -> None:
        """Give the servers new variables, and variables that the driver wrote, with this worker's values."""
        self.look(variables)
        written = set(self.slices.written())
        new = self._adopt(slices)
        self.slices.create([*new, *(handle for handle in self.slices.table if handle in written)])
        self.slices.keep_written()
        self._create_tables()
        loaded = variables.take_loaded_states()
        for optimizer in variables.optimizers():
            fresh = not self.optimizers.is_told(optimizer)
            self.optimizers.tell(optimizer)
            if self._known.handle_of(optimizer) in loaded or (fresh and optimizer.state):
                self.optimizers.write_state(optimizer)

    def follow(self, variables: VariablesView, slices: Sequence[PsSlice]) -> None:
        """Adopt a placement by another worker: the servers have the values from there."""
        self.look(variables)
        self._adopt(slices)
        self.slices.discard_written()
        for handle, weight in self._new_tables():
            take_held_rows(weight)  # the servers have them
            self._tables.add(handle)
        variables.take_loaded_states()
        for optimizer in variables.optimizers():
            self.optimizers.follow(optimizer)

    def create_again(self) -> None:
        """Create everything on servers that have started again, with this worker's values for the present."""
        self.slices.create(list(self.slices.table))
        self.slices.discard()
        for handle, weight in self._known.tensors():
            if handle in self._tables:
                self.rows.create(weight, ())
        self.optimizers.tell_again()

    def restore_all(self, order: HandledRestore) -> None:
        """Make every server begin to read its part of a checkpoint, which must have all that the servers hold."""
        objects = order.objects(self._known.get)
        modules = {name: obj for name, obj in objects.items() if isinstance(obj, torch.nn.Module)}
        begun = PsRestores(self.placed).begin(order.request, objects, modules)
        differences = [each for several in begun.shard.differences.values() for each in several]
        if differences:
            raise FailedPreconditionError(f"of the checkpoint, {describe_differences(differences)}")
        left = {id(buffer) for module in modules.values() for buffer in module.buffers()}  # those that are not saved
        names = names_of_variables(self._known.objects())
        tensors = [(handle, obj) for handle, obj in self._known.tensors() if obj.numel() and id(obj) not in left]
        optimizers = [(self._known.handle_of(each), each) for each in self.optimizers.everyone()]
        for handle, obj in [*tensors, *optimizers]:
            if handle not in begun.handles:
                raise FailedPreconditionError(f"the checkpoint lacks {names.get(id(obj), type(obj).__name__)}")

    def _adopt(self, slices: Sequence[PsSlice]) -> list[int]:
        """Adopt variables that have slices now; return their handles."""
        new = self.slices.adopt(slices, dict(self._known.tensors()))
        if new:
            self.optimizers.forget_plans()
        return new

    def _new_tables(self) -> list[tuple[int, torch.Tensor]]:
        tensors = self._known.tensors()
        return [each for each in tensors if each[0] not in self._tables and spec_of(each[1]) is not None]

    def _create_tables(self) -> None:
        for handle, weight in self._new_tables():
            self.rows.create(weight, take_held_rows(weight))
            self._tables.add(handle)


_NO_CLOSURE = ClosureLabel(-1)
_Change = Literal["values", "states", "push"]
_CHANGES: tuple[_Change, ...] = get_args(_Change)


@final
class PsVariables(WorkerRules):
    """Rules of a worker whose variables live on servers.

    Args:
        prefetch_pulls: Use the values that came with the last push for the next closure, unless the program had seen
            newer ones when it scheduled the closure; without it, every closure pulls.
    """

    def __init__(
        self,
        worker: int,
        connections: Sequence[ServerConnection],
        *,
        generation: int = 0,
        consistency: Consistency = "async",
        prefetch_pulls: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        self._make = functools.partial(
            PsVariables,
            worker,
            tuple(connections),
            generation=generation,
            consistency=consistency,
            prefetch_pulls=prefetch_pulls,
            timeout_s=timeout_s,
        )
        self._sender = Sender(worker, generation)
        self._client = ServerClient(connections, self._sender, timeout_s=timeout_s)
        self._model = PsModel(self._client)
        self._in_steps = isinstance(consistency, SyncWithBackups)
        self._prefetch = prefetch_pulls and consistency == "async"
        self._closure = _NO_CLOSURE
        self._num_steps = 0
        self._step = 0
        self._counts = False
        self._run = contextlib.ExitStack()
        # torch wraps an optimizer's own step in this way: global hooks, the program's and raydist's, run around it.
        self._hooked_push = torch.optim.Optimizer.profile_hook_step(self._push_of)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, ()  # the object is pickled only before its first use

    # --- around closures ----------------------------------------------------------------------------------------------

    def before_run(self, variables: VariablesView, closure: ClosureLabel) -> None:
        self._run.close()
        self._run.enter_context(reading_rows(self._model.rows))
        self._closure, self._num_steps = closure, 0
        self._model.look(variables)
        if self._in_steps:
            first_step = self._client.ask(0, BeginClosure(self._sender, closure.number)).step
            self._counts = True
            self._step = self._model.slices.read_step(first_step)
        else:
            self._model.slices.read_older(closure.seen if self._prefetch else None)
        self._model.states.begin()

    def after_run(self, variables: Any) -> None:
        self._tell_written(parameters_only=False)

    def after_failure(self, variables: VariablesView) -> None:
        if self._closure is not _NO_CLOSURE:  # else no closure of the program has run
            # Values written by hand count, like pushed gradients. The program gets its own error.
            with contextlib.suppress(Exception):
                self._model.states.write(self._key("states"))
            with contextlib.suppress(Exception):
                self._tell_values(self._written_that_fit())
        self._model.slices.discard()

    def end_closure(self, variables: VariablesView, *, last: bool) -> None:
        self._run.close()
        self._model.states.end()
        if last and self._counts:
            self._counts = False
            self._client.ask(0, EndClosure(self._sender, self._closure.number))
        self._closure = _NO_CLOSURE

    def versions(self) -> tuple[int, ...]:
        return self._model.slices.versions()

    # --- steps of optimizers ------------------------------------------------------------------------------------------

    @disable_compiler  # a compiled step would trace it
    def step_optimizer(
        self,
        variables: Any,
        optimizer: torch.optim.Optimizer,
        step: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if any(given is not None for given in [*args, *kwargs.values()]):
            raise InvalidArgumentError(
                f"{type(optimizer).__name__}.step must be called without arguments where parameter servers carry it "
                "out, got some. A closure would have to run there: compute the loss, call backward(), and then step()."
            )
        return self._hooked_push(optimizer)

    def _push_of(self, optimizer: torch.optim.Optimizer) -> None:
        self._tell_written(parameters_only=True)
        self._push(optimizer)
        self._model.states.stepped(optimizer)

    def _push(self, optimizer: torch.optim.Optimizer) -> None:
        push, key = self._model.optimizers.push_of(optimizer), self._key("push")
        self._num_steps += 1
        if push is None:
            return
        if not self._in_steps:
            self._model.slices.push_and_read(push, key)
            return
        answer = self._client.ask(0, Arrive(self._sender, key, self._step))
        step = self._step
        if answer.verdict != "late":
            step = answer.step  # a later step if a worker before this one died with the same gradient
            self._model.slices.push_step(push, key, step=step, completes=answer.completes)
        self._step = self._model.slices.read_step(step + 1, parameters_only=True)

    def _tell_written(self, *, parameters_only: bool) -> None:
        self._model.states.write(self._key("states"))
        self._tell_values(self._model.slices.written(parameters_only=parameters_only), parameters_only=parameters_only)

    def _written_that_fit(self) -> list[int]:
        """Return the variables that the closure wrote, without data that a variable cannot keep."""
        with contextlib.suppress(InvalidArgumentError):
            return self._model.slices.written()
        return self._model.slices.written()  # the first call has undone what it refused

    def _tell_values(self, written: Sequence[int], *, parameters_only: bool = False) -> None:
        if written:
            self._model.slices.assign(written, self._key("values"), parameters_only=parameters_only)

    def _key(self, change: _Change) -> PushKey:
        """Index changes by steps alone: when the closure runs again, it may have nothing to write by hand."""
        index = self._num_steps * len(_CHANGES) + _CHANGES.index(change)
        return PushKey(self._closure.number, index, self._closure.finished_below)

    # --- what the driver does -----------------------------------------------------------------------------------------

    def settle(self, variables: VariablesView) -> tuple[VariableSpec, ...]:
        return self._model.settle(variables)

    def place(self, variables: VariablesView, plan: Sequence[PsSlice], closure: ClosureLabel) -> None:
        self._model.place(variables, plan)

    def follow(self, variables: VariablesView, plan: Sequence[PsSlice] | None) -> None:
        self._model.follow(variables, plan or ())

    def restore_servers(self, variables: VariablesView, order: HandledRestore) -> None:
        self._model.look(variables)
        self._model.create_again()
        self._model.restore_all(order)

    def before_read(self, variables: VariablesView, *, states: bool) -> None:
        self._model.look(variables)
        self._model.slices.read_older(None)
        if states:
            self._model.optimizers.read_states()

    def injected(self) -> dict[str, Any]:
        return {"ps_saves": PsSaves(self._model.placed), "ps_restores": PsRestores(self._model.placed)}

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return reading_rows(self._model.rows)
