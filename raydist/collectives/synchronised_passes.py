"""Backward passes of one replica whose gradients are global when they return: one after another.

What `.grad` held is set aside, each new gradient goes to a `BucketExchange`, and at the true end of the pass the
reduced gradients are added to what was set aside. So only new gradients are weighted and sent, however often a step
calls `backward()`.

Hooks that the program has on parameters must see global gradients, so they are held back meanwhile. Then a second,
short pass of the autograd engine hands each hooked parameter its global gradient: torch itself calls the hooks, adds to
`.grad` and looks at what they return. (So a parameter that several segments of a reentrant checkpoint use has its hooks
called once, with the sum; without replicas torch calls them once a segment.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.collectives.accumulation import LocalAccumulation, accumulate
from raydist.collectives.backward_pass import BackwardPass
from raydist.collectives.base import Communicator
from raydist.collectives.buckets.buffer import BucketBuffer
from raydist.collectives.buckets.exchange import BucketExchange, is_profiled
from raydist.collectives.buckets.exchanges import Exchanges
from raydist.collectives.buckets.forms import StepWeight
from raydist.collectives.buckets.tail import PassStamp, Updates
from raydist.collectives.nonfinite.policy import NonfinitePolicy
from raydist.collectives.parameter_hooks import HeldBack
from raydist.collectives.straight_pass import StraightPass
from raydist.collectives.trained_parameters import TrainedParameters

__all__ = ["EngineCall", "SynchronisedPasses"]

# Where `torch.autograd.backward` takes it.
_CREATE_GRAPH = 3


@final
@dataclass(slots=True, eq=False)  # not frozen: one is made for every pass, and that takes a microsecond more
class EngineCall:
    """A call of `torch.autograd.backward`, to be made. Nobody changes it.

    Attributes:
        original: Torch's function.
        args: What it is given.
        kwargs: And by name.
    """

    original: Callable[..., None]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> None:
        """Make it."""
        self.original(*self.args, **self.kwargs)

    @property
    def create_graph(self) -> bool:
        """Whether the gradients are to be differentiable."""
        args = self.args
        return bool(args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else self.kwargs.get("create_graph", False))


@final
class SynchronisedPasses:
    """The passes of one replica's steps.

    Args:
        communicator: Carries what follows the buckets.
        exchanges: Carries the buckets.
        parameters: Whose gradients.
        updates: What this rank has done with earlier gradients.
        policy: What NaN and infinities do; None for nothing.

    Attributes:
        in_hooks: Whether the program's hooks on parameters are being called.
    """

    def __init__(
        self,
        communicator: Communicator,
        exchanges: Exchanges,
        parameters: TrainedParameters,
        updates: Callable[[], Updates],
        policy: NonfinitePolicy | None,
    ) -> None:
        self.in_hooks = False
        self._communicator = communicator
        self._exchanges = exchanges
        self._parameters = parameters
        self._updates = updates
        self._policy = policy
        self._straight = StraightPass(communicator, parameters, exchanges)
        self._accumulation = LocalAccumulation()
        self._appears_twice: set[int] = set()
        self._weight = StepWeight(1.0, counts=True)
        self._adds_up = False
        self._step = 0
        self._num_passes = 0
        self._twice_differentiable = False

    def begin_step(self, step: int, weight: StepWeight, *, adds_up: bool) -> None:
        """What follows belongs to this step."""
        self._step = step
        self._weight = weight
        self._adds_up = adds_up
        self._num_passes = 0
        self._twice_differentiable = False

    def run(self, call: EngineCall, *, local: bool) -> None:
        """A pass whose gradients are global at its end, or kept for one that is; one that fails changes none.

        Blocking: until all ranks have ended their pass, at most the communicator's limit.
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
            for index in earlier:
                self._parameters.all[index].grad = None
            if local:
                call.run()
                self._keep_local(earlier)
            elif not earlier and not hooks.indices and (buffer := self._straight_buffer(call)) is not None:
                self._go_straight(call, buffer, hooks)
            else:
                self._synchronise(call, earlier, hooks)
        except BaseException:
            for parameter, gradient in zip(self._parameters.trained, before, strict=True):
                parameter.grad = gradient
            raise
        finally:
            hooks.give_back()
            self.in_hooks = False
            self._parameters.door.shut()

    def _straight_buffer(self, call: EngineCall) -> BucketBuffer | None:
        """What the pass may go straight through, where nobody looks on the way."""
        looks = (self._policy is not None and self._policy.looks) or is_profiled()
        return None if looks or not self._weight.counts or call.create_graph else self._straight.buffer()

    def _go_straight(self, call: EngineCall, buffer: BucketBuffer, hooks: HeldBack) -> None:
        self._num_passes += 1
        if self._straight.run(call.run, buffer, self._weight.scale, self._stamp()):
            self._accumulation.forget(self._parameters.indices)
            return
        exchange = self._open_exchange(kept=(), reduced=True)
        exchange.put_all(self._parameters.take())
        self._conclude(call, self._present(call, exchange), {}, hooks)

    def _synchronise(self, call: EngineCall, earlier: dict[int, torch.Tensor], hooks: HeldBack) -> None:
        parts = {index: self._accumulation.parts_of(index, gradient) for index, gradient in earlier.items()}
        self._num_passes += 1
        exchange = self._open_exchange(kept=list(earlier.values()))
        for index, (_, contribution) in parts.items():
            if contribution is not None:
                exchange.preload(index, contribution)
        self._put_gradients(call, exchange)
        bases = {index: base for index, (base, _) in parts.items()}
        self._conclude(call, self._present(call, exchange), bases, hooks)

    def _conclude(
        self, call: EngineCall, present: BackwardPass, bases: dict[int, torch.Tensor | None], hooks: HeldBack
    ) -> None:
        """Every gradient of the pass is in its exchange: make them global, and show them."""
        new = present.finish()
        if self._policy is not None and self._policy.looks:
            self._look(self._policy, present, new)
        for_hooks = {index: new.pop(index) for index in tuple(new) if index in hooks.indices} if hooks.indices else {}
        self._show(bases, new)
        self._accumulation.forget(self._parameters.indices)
        self._appears_twice.update(present.exchange.late)
        self._twice_differentiable |= call.create_graph
        self._exchanges.done()
        if for_hooks:
            hooks.give_back()
            self.in_hooks = True
            # Torch brings each its gradient, in the same order on every rank, and calls the hooks on the way.
            parameters = tuple(self._parameters.all[index] for index in for_hooks)
            call.original(parameters, tuple(for_hooks.values()), create_graph=call.create_graph)

    def _present(self, call: EngineCall, exchange: BucketExchange) -> BackwardPass:
        return BackwardPass(self._communicator, exchange, self._weight, create_graph=call.create_graph)

    def _stamp(self) -> PassStamp:
        return PassStamp(self._step, self._num_passes, adds_up=self._adds_up, updates=self._updates())

    def _open_exchange(self, *, kept: Sequence[torch.Tensor], reduced: bool = False) -> BucketExchange:
        trained = self._parameters.indices
        # Collectives inside a second derivative run at places of their own: then no bucket may leave before the end.
        return self._exchanges.open(
            trained,
            self._parameters.all,
            self._stamp(),
            self._weight,
            kept=kept,
            held=trained if self._twice_differentiable else self._appears_twice,
            reduced=reduced,
        )

    def _put_gradients(self, call: EngineCall, exchange: BucketExchange) -> None:
        """Run the pass: each gradient goes into the exchange as it appears, or all at the end if none leaves before."""
        door = self._parameters.door
        if exchange.leaves_at_end:
            door.gathering = True
            call.run()
            exchange.put_all(self._parameters.take())
        else:
            door.receiver = self._exchanges.receiver
            call.run()
        door.shut()

    def _look(self, policy: NonfinitePolicy, present: BackwardPass, new: dict[int, torch.Tensor]) -> None:
        """Before anybody sees what a pass brought, hooks that step an optimizer included."""
        brought = (self._parameters.all[index] for index in new)
        if policy.refuses(brought, new_are_finite=present.is_finite()):
            place = f"backward pass {self._num_passes} of batch {self._step}"
            raise policy.error(place, present.accuse(), self._parameters.all)

    def _show(self, earlier: dict[int, torch.Tensor | None], new: dict[int, torch.Tensor]) -> None:
        """Let `.grad` hold what was global before, and what is new."""
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
