"""The worker's side of variables that live on parameter servers.

Before a closure runs, the worker pulls the parameters whose held versions are too old. `optimizer.step()` pushes the
present `.grad`; the servers do the step itself, and their answer contains the new parameters. Values that the function
writes by hand are assigned when an optimizer steps and when the closure ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, final, get_args

import torch

from raydist.checkpoints.ps_restore import PsRestores
from raydist.checkpoints.ps_save import PsSaves
from raydist.compat.torch_internals import disable_compiler
from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.client import ServerClient
from raydist.parameter_servers.connection import ServerConnection
from raydist.parameter_servers.consistency import Consistency, SyncWithBackups
from raydist.parameter_servers.local_rows import reading_rows
from raydist.parameter_servers.requests import Arrive, BeginClosure, EndClosure, PushKey, Sender
from raydist.parameter_servers.slices import PsSlice, VariableSpec
from raydist.replicas.ps.model import PsModel
from raydist.replicas.ps.work_message import ClosureLabel
from raydist.replicas.ps.worker_runner import WorkerRules
from raydist.replicas.rules import VariablesView

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
        self._made_of = worker, tuple(connections), generation, consistency, prefetch_pulls, timeout_s
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
        return _made, self._made_of  # the object is pickled only before its first use

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

    def told(self) -> tuple[int, ...]:
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

    def before_read(self, variables: VariablesView, *, states: bool) -> None:
        self._model.look(variables)
        self._model.slices.read_older(None)
        if states:
            self._model.optimizers.read_states()

    def injected(self) -> dict[str, Any]:
        return {"ps_saves": PsSaves(self._model.held), "ps_restores": PsRestores(self._model.held)}

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return reading_rows(self._model.rows)


def _made(
    worker: int,
    connections: Sequence[ServerConnection],
    generation: int,
    consistency: Consistency,
    prefetch_pulls: bool,
    timeout_s: float,
) -> PsVariables:
    return PsVariables(
        worker,
        connections,
        generation=generation,
        consistency=consistency,
        prefetch_pulls=prefetch_pulls,
        timeout_s=timeout_s,
    )
