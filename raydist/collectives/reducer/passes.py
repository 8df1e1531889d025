"""Synchronised backward passes of one replica: gradients are global when a pass returns.

A pass sets earlier gradients aside, puts each new gradient into an `Exchange`, and finally adds the reduced gradients
to the earlier ones. So only new gradients are weighted and sent, however often a step calls `backward()`.

The program's hooks on parameters must see global gradients, so a pass defers them. Then a second, short pass of the
autograd engine gives each hooked parameter its global gradient: torch calls the hooks, handles the values that they
return, and adds to `.grad`. (So a parameter that several segments of a reentrant checkpoint use has its hooks called
once, with the sum; without replicas torch calls them once a segment.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.buckets import Buckets
from raydist.collectives.reducer.exchange import Exchange, StepWeight
from raydist.collectives.reducer.known_gradients import (
    ChangedGradients,
    Checksums,
    KnownGradients,
    LocalAccumulation,
    accumulate,
    combined,
    compare,
)
from raydist.collectives.reducer.nonfinite import NonfinitePolicy, fault_of
from raydist.collectives.reducer.parameter_hooks import HeldBack, TrainedParameters
from raydist.collectives.reducer.trailer import PassStamp, ReceivedTrailer, Updates
from raydist.errors import CollectiveMismatchError
from raydist.values import ReduceOp

__all__ = ["EngineCall", "SynchronisedPasses"]

# Position of the argument of `torch.autograd.backward`.
_CREATE_GRAPH = 3


@final
@dataclass(slots=True, eq=False)  # not frozen: creation would take a microsecond more in every pass
class EngineCall:
    """A deferred call of `torch.autograd.backward`. Never modified.

    Attributes:
        original: The function of torch.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    original: Callable[..., None]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> None:
        """Make the call."""
        self.original(*self.args, **self.kwargs)

    @property
    def create_graph(self) -> bool:
        """True if the gradients must be differentiable."""
        args = self.args
        return bool(args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else self.kwargs.get("create_graph", False))


@final
class SynchronisedPasses:
    """The backward passes in the steps of one replica.

    Args:
        communicator: Communicator for everything except the buckets.
        buckets: The gradient buckets.
        parameters: The parameters of the reducer.
        updates: Returns this rank's optimizer updates.
        calls: Returns a digest of the user collectives that this rank has called.
        policy: Treatment of NaN and infinite gradients; None for none.
        names: Returns names of parameters for error messages.

    Attributes:
        in_hooks: True while the program's hooks on parameters run.
        known: Record of the gradients that are global.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: Buckets,
        parameters: TrainedParameters,
        updates: Callable[[], Updates],
        calls: Callable[[], int],
        policy: NonfinitePolicy | None,
        names: Callable[[Iterable[torch.nn.Parameter]], Sequence[str]],
    ) -> None:
        self.in_hooks = False
        self.known = KnownGradients()
        self._changed = ChangedGradients()
        self._names = names
        self._communicator = communicator
        self._buckets = buckets
        self._parameters = parameters
        self._updates = updates
        self._calls = calls
        self._policy = policy
        self._accumulation = LocalAccumulation()
        self._repeated: set[int] = set()
        self._weight = StepWeight(1.0, counts=True)
        self._adds_up = False
        self._step = 0
        self._num_passes = 0
        self._twice_differentiable = False
        self._exchange: Exchange | None = None
        self._unchecked: tuple[Callable[[], ReceivedTrailer], list[Checksums]] | None = None

    def begin_step(self, step: int, weight: StepWeight, *, adds_up: bool) -> None:
        """Begin a step, which contains the following passes."""
        self._step = step
        self._weight = weight
        self._adds_up = adds_up
        self._num_passes = 0
        self._twice_differentiable = False

    def begin_segment(self) -> None:
        """Note that a nested backward pass begins: a segment of a reentrant checkpoint.

        A parameter may then get several gradients, so the remaining buckets are sent at the end of the outer pass.
        """
        if self._exchange is not None:
            self._exchange.hold()

    def run(self, call: EngineCall, *, local: bool) -> None:
        """Run a synchronised pass, or a local one whose gradients are kept. A pass that fails leaves `.grad` unchanged.

        Blocking: until all ranks have ended their pass, at most the communicator's limit. Where the host runs ahead of
        the device, only if this rank lacks a gradient or gradients are checked for NaN and infinities.
        """
        self._parameters.look()
        before = [parameter.grad for parameter in self._parameters.trained]
        earlier = {
            index: gradient
            for index, gradient in zip(self._parameters.indices, before, strict=True)
            if gradient is not None
        }
        hooks = HeldBack(self._parameters.hooked())
        try:
            alone = self._communicator.world_size == 1
            made = self._count_made(earlier) if earlier and not alone else {}
            for index in earlier:
                self._parameters.all[index].grad = None
            if local:
                call.run()
                self._keep_local(earlier)
            else:
                self._synchronise(call, earlier, hooks)
            if made and not local:
                self.known.note([self._parameters.all[index] for index in made], by_hand=True)
        except BaseException:
            for parameter, gradient in zip(self._parameters.trained, before, strict=True):
                parameter.grad = gradient
            raise
        finally:
            hooks.give_back()
            self.in_hooks = False
            self._exchange = None
            self._parameters.door.shut()

    def _synchronise(self, call: EngineCall, earlier: dict[int, torch.Tensor], hooks: HeldBack) -> None:
        parts = {index: self._accumulation.parts_of(index, gradient) for index, gradient in earlier.items()}
        self._num_passes += 1
        noted = self._changed.take()
        contributions = {index: local for index, (_, local) in parts.items() if local is not None}
        exchange = self._exchange = self._open(combined(noted), contributions)
        self._put_gradients(call, exchange)
        exchange.finish()
        new = self._reduced(call, exchange, noted)
        if self._policy is not None and self._policy.looks:
            self._look(self._policy, exchange, new)
        brought = [self._parameters.all[index] for index in new]
        for_hooks = {index: new.pop(index) for index in tuple(new) if index in hooks.indices} if hooks.indices else {}
        self._show({index: base for index, (base, _) in parts.items()}, new)
        self._accumulation.forget(self._parameters.indices)
        if for_hooks:
            hooks.give_back()
            self.in_hooks = True
            # This pass of torch accumulates the gradients in the same order on every rank, and calls the hooks.
            parameters = tuple(self._parameters.all[index] for index in for_hooks)
            call.original(parameters, tuple(for_hooks.values()), create_graph=call.create_graph)
        self.known.note(brought, by_hand=call.original is _assign)

    def _reduced(self, call: EngineCall, exchange: Exchange, noted: list[Checksums]) -> dict[int, torch.Tensor]:
        """After `finish`, return parameter index -> new global gradient, for gradients that any replica has."""
        create_graph = call.create_graph
        trailer = exchange.read_trailer()
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None:
            self._check(unchecked[0](), unchecked[1])
        present = None
        if trailer is not None and self._communicator.host_runs_ahead and exchange.is_whole and not create_graph:
            self._unchecked = trailer, noted
        elif trailer is not None:
            received = trailer()
            present = received.present
            if self._communicator.host_runs_ahead:  # check in the next pass, as the ranks do that need not read it now
                self._unchecked = (lambda: received), noted
            else:
                self._check(received, noted)
        found = exchange.gradients(present)
        if create_graph:
            found = {index: self._connected(exchange, index, value) for index, value in found.items()}
        self._repeated |= exchange.repeated
        self._twice_differentiable |= create_graph
        return found

    def _check(self, received: ReceivedTrailer, noted: list[Checksums]) -> None:
        """Raise on all replicas if they ran different passes, or have changed earlier gradients differently."""
        received.check()
        if received.checksums_differ:
            compare(self._communicator, noted, lambda index: self._names([self._parameters.all[index]])[0])

    def _connected(self, exchange: Exchange, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return a differentiable gradient, as `backward(create_graph=True)` does."""
        local = exchange.local.get(index)
        if value.is_sparse or (local is not None and local.is_sparse):
            return value
        start = torch.zeros_like(value, requires_grad=True) if local is None else local
        apply: Any = _Connected.apply  # torch leaves it untyped
        connected: torch.Tensor = apply(start, value.clone(), self._communicator, self._weight)
        return connected

    def exchange_made_by_hand(
        self, parameters: Collection[torch.nn.Parameter], *, used: bool, filled_anew: bool
    ) -> bool:
        """Exchange the gradients of these parameters that no backward pass has made global.

        Args:
            parameters: Parameters of an optimizer.
            used: The optimizer uses the gradients now; later contents of `.grad` count as new.
            filled_anew: A tensor written after an optimizer has used it holds a new gradient.

        Returns:
            True if this replica had gradients made by hand, which were exchanged.

        Blocking: where gradients are exchanged, until all ranks make this call or run a backward pass.
        """
        made = self._made_by_hand(parameters, filled_anew=filled_anew)
        # At the end of a batch, gradients of no_sync() go on waiting for a backward pass; an optimizer exchanges them.
        if made or (filled_anew and self._accumulation and any(map(self._is_local, parameters))):
            frozen = [self._parameters.all[index] for index in made if not self._parameters.all[index].requires_grad]
            try:
                for parameter in frozen:  # only trained parameters have a slot in a bucket
                    parameter.requires_grad_(True)
                self._run_by_hand(made)
            finally:
                for parameter in frozen:
                    parameter.requires_grad_(False)
        if used:
            self.known.note_used(parameters)
        return bool(made)

    def _run_by_hand(self, made: dict[int, torch.Tensor]) -> None:
        """Run a pass that exchanges gradients made by hand only, and write the result into their tensors."""
        stale = [self._parameters.all[index] for index in self._parameters.all.keys() - made.keys()]
        stale = [parameter for parameter in stale if self.known.is_stale(parameter)]
        for index, gradient in made.items():
            self._parameters.all[index].grad = self._as_local(index, gradient)
        self.run(EngineCall(_assign, (), {}), local=False)
        for parameter in stale:
            if not self.known.is_stale(parameter):  # another replica had a new gradient
                raise CollectiveMismatchError(
                    "All replicas must make the same gradients by hand before optimizer.step(), but others have a new "
                    f"one for {self._names([parameter])[0]} while this one holds that of an earlier step. Let all "
                    "replicas fill .grad, or set it to None everywhere."
                )
        parameters = [self._parameters.all[index] for index in made]
        for parameter, gradient in zip(parameters, made.values(), strict=True):
            parameter.grad = _written(gradient, parameter.grad)
        self.known.note(parameters, by_hand=True)  # `.grad` is another tensor now

    def _count_made(self, earlier: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the gradients of `earlier` that were made by hand, after adding them to the local accumulation."""
        made = self._made_by_hand([self._parameters.all[index] for index in earlier], filled_anew=False)
        for index, gradient in made.items():
            shown = self._as_local(index, gradient)
            if shown is None:
                del earlier[index]
                self._parameters.all[index].grad = None
            else:
                earlier[index] = shown
        return made

    def _is_local(self, parameter: torch.nn.Parameter) -> bool:
        index = self._parameters.number_of(parameter)
        return index is not None and parameter.grad is not None and self._accumulation.holds(index, parameter.grad)

    def _made_by_hand(self, parameters: Iterable[torch.nn.Parameter], *, filled_anew: bool) -> dict[int, torch.Tensor]:
        """Return the gradients that this replica has made by hand, by number, and record the changed gradients."""
        made: dict[int, torch.Tensor] = {}
        changed: dict[int, torch.Tensor] = {}
        for parameter in self.known.unknown(parameters):
            index, gradient = self._parameters.number_of(parameter), parameter.grad
            if index is None or gradient is None or self._accumulation.holds(index, gradient):
                continue
            by_hand = self.known.is_made_by_hand(parameter, adds_up=self._adds_up, filled_anew=filled_anew)
            (made if by_hand else changed)[index] = gradient
        if changed:
            self._changed.add(changed)
            self.known.note_changed(self._parameters.all[index] for index in changed)
        return made

    def _as_local(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add the new part of a gradient made by hand to the local accumulation, with the weight of this batch.

        Return the new `.grad`: None where the replica's gradients count as zero and no global part exists.
        """
        base = self.known.base_of(self._parameters.all[index])
        if not self._weight.counts:
            return base
        new = gradient if base is None else gradient.detach() - base
        self._accumulation.forget((index,))
        return self._accumulation.add(index, base, new, self._weight.scale, by_hand=True)

    def _open(self, checksum: torch.Tensor | None, contributions: dict[int, torch.Tensor]) -> Exchange:
        trained = self._parameters.indices
        plan = self._buckets.begin_pass(trained, self._parameters.all, step=self._step, backward=self._num_passes)
        stamp = PassStamp(
            self._step, self._num_passes, adds_up=self._adds_up, updates=self._updates(), calls=self._calls()
        )
        # A double backward calls all_reduce inside the pass, so no bucket may be sent before the end of the pass.
        hold_with = trained if self._twice_differentiable else self._repeated
        return Exchange(
            self._communicator,
            self._buckets,
            plan,
            stamp.encode(),
            checksum,
            self._weight,
            earlier=contributions,
            hold_with=hold_with,
        )

    def _put_gradients(self, call: EngineCall, exchange: Exchange) -> None:
        """Run the pass. Gradients go into the exchange one by one, or at the end if no bucket is sent before."""
        door = self._parameters.door
        door.gathering = exchange.leaves_at_end
        door.receiver = exchange.put
        call.run()
        if door.gathering:
            exchange.put_all(self._parameters.take())
        door.shut()

    def _look(self, policy: NonfinitePolicy, exchange: Exchange, new: dict[int, torch.Tensor]) -> None:
        """Check gradients for NaN and infinities before hooks and optimizers see them."""
        brought = (self._parameters.all[index] for index in new)
        if policy.refuses(brought, new_are_finite=exchange.is_finite()):
            place = f"backward pass {self._num_passes} of batch {self._step}"
            raise policy.error(place, self._accuse(exchange), self._parameters.all)

    def _accuse(self, exchange: Exchange) -> list[dict[int, int]]:
        """Return the faults of each replica's own gradients (see `fault_of`). Blocks until all replicas call it."""
        own = {index: exchange.weighted(index) for index in self._parameters.indices}
        mine = {index: fault for index, each in own.items() if each is not None and (fault := fault_of(each))}
        said = self._communicator.exchange_on_host(json.dumps(mine).encode(), "gradients that are not finite")
        return [{int(index): fault for index, fault in sorted(json.loads(row).items())} for row in said]

    def _show(self, earlier: dict[int, torch.Tensor | None], new: dict[int, torch.Tensor]) -> None:
        """Set `.grad` to the sum of the earlier and the new global gradients."""
        parameters = self._parameters.all
        for index, gradient in new.items():
            base = earlier.get(index)
            parameters[index].grad = gradient if base is None else accumulate(base, gradient)
        for index in earlier.keys() - new.keys():
            parameters[index].grad = earlier[index]

    def _keep_local(self, earlier: dict[int, torch.Tensor]) -> None:
        for index, parameter in zip(self._parameters.indices, self._parameters.trained, strict=True):
            gradient, new = earlier.get(index), parameter.grad
            if new is None or not self._weight.counts:
                parameter.grad = gradient
            else:
                parameter.grad = self._accumulation.add(index, gradient, new, self._weight.scale)


def _assign(
    parameters: Sequence[torch.nn.Parameter] = (), gradients: Sequence[torch.Tensor] = (), *, create_graph: bool = False
) -> None:
    """Replace the autograd engine in a pass without new gradients; hooks do not see gradients made by hand."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _written(made: torch.Tensor, reduced: torch.Tensor | None) -> torch.Tensor | None:
    """Copy `reduced` into the program's own tensor, which may be a view that the program fills again, and return it."""
    if reduced is None or made.requires_grad or made.layout is not reduced.layout or made.is_sparse:
        return reduced
    try:
        with torch.no_grad():
            return made.copy_(reduced)
    except RuntimeError:  # an expanded tensor, one of inference mode
        return reduced


class _Connected(torch.autograd.Function):
    """A global gradient that is differentiable with respect to this replica's own gradient.

    G = sum of w_i g_i, and the objective is the sum of w_j L_j(G). The objective's gradient with respect to g_i is
    w_i sum of w_j dL_j/dG; the factor w_i is left out, since the pass that uses the result multiplies by it.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, value: torch.Tensor, communicator: Communicator, weight: StepWeight
    ) -> torch.Tensor:
        ctx.communicator = communicator
        ctx.weight = weight
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight: StepWeight = ctx.weight
        total = upstream * weight.scale if weight.counts else torch.zeros_like(upstream)
        ctx.communicator.all_reduce(total, ReduceOp.SUM).wait()
        return total, None, None, None
