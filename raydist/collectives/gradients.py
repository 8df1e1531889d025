"""Gradients of one replica that are global when `backward()` returns.

While a step is open, every synchronised backward pass of its thread goes like this: what `.grad` held is set aside,
hooks hand each new gradient to a `BucketExchange` as it appears, and at the true end of the pass the reduced gradients
are added to what was set aside. So only new gradients are weighted and sent, however often a step calls `backward()`.

Hooks that the program has on parameters must see global gradients, so they are held back meanwhile. Then a second,
short pass of the autograd engine hands each hooked parameter its global gradient: torch itself calls the hooks, adds to
`.grad` and looks at what they return. (So a parameter that several segments of a reentrant checkpoint use has its hooks
called once, with the sum; without replicas torch calls them once a segment.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, final

import torch

from raydist.collectives.accumulation import LocalAccumulation, accumulate
from raydist.collectives.backward_pass import BackwardPass
from raydist.collectives.base import Communicator
from raydist.collectives.buckets.exchange import BucketExchange
from raydist.collectives.buckets.exchanges import Exchanges
from raydist.collectives.buckets.forms import StepWeight
from raydist.collectives.buckets.tail import PassStamp, Updates
from raydist.collectives.interception import intercept_backward
from raydist.collectives.nonfinite.policy import NonfinitePolicy
from raydist.collectives.parameter_hooks import HeldBack
from raydist.collectives.trained_parameters import TrainedParameters
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.values import ReduceOp

__all__ = ["WIRES", "GradientReducer"]

_MEGABYTE = 1 << 20
WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""What float32 travels as, by the names of `CommunicationOptions.compression`."""
# Where `torch.autograd.backward` takes it.
_CREATE_GRAPH = 3


@final
class GradientReducer:
    """Reduces the gradients of one replica's parameters with those of its peers.

    Args:
        communicator: A group of its own: user-level collectives inside a backward pass must travel on another one.
        bucket_bytes: Gradients that travel together.
        first_bucket_bytes: Those that travel first.
        updates: What this rank has done with earlier gradients: must be the same on all.
        policy: What NaN and infinities do; None for nothing.
        compression: What float32 gradients travel as, "fp16" or "bf16"; None for what they are.
        expect_rows: Identities of parameters whose gradients will be sparse, the same on all ranks; others that turn
            out to be are found in their first pass.

    One backward pass costs one all-reduce per bucket. What `.grad` holds afterwards is the memory that was reduced.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_bytes: int = 25 * _MEGABYTE,
        first_bucket_bytes: int = _MEGABYTE,
        updates: Callable[[], Updates] = Updates,
        policy: NonfinitePolicy | None = None,
        compression: Literal["fp16", "bf16"] | None = None,
        expect_rows: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._updates = updates
        self._policy = policy
        self._communicator = communicator
        self._exchanges = Exchanges(
            communicator,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            compression=None if compression is None else WIRES[compression],
            expect_rows=expect_rows,
        )
        self._parameters = TrainedParameters(self._stray)
        self._accumulation = LocalAccumulation()
        self._appears_twice: set[int] = set()
        self._weight: StepWeight | None = None
        self._adds_up = False
        self._num_steps = 0
        self._num_passes = 0
        self._twice_differentiable = False
        self._local = False
        self._inside = False
        self._in_hooks = False
        self._interception = intercept_backward(self._backward)

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Take charge of these parameters, and of no others any more.

        Args:
            parameters: In the same order on every rank. Giving the same tuple again costs nothing.
        """
        self._parameters.attach(parameters)

    def step(
        self,
        *,
        weight: float = 1.0,
        op: ReduceOp = ReduceOp.MEAN,
        empty: bool = False,
        index: int | None = None,
    ) -> AbstractContextManager[None]:
        """Make the gradients of every `backward()` that this thread calls inside the block global.

        Args:
            weight: For MEAN: this replica's share of the global batch's rows, n_i / n.
            op: MEAN adds up weighted gradients, SUM plain ones.
            empty: The replica has no rows: its gradients count as zero, whatever they are (NaN included).
            index: Number of the step, for ranks that do not all start with the first; None counts by itself.

        Raises:
            InvalidArgumentError: `op` is neither MEAN nor SUM, or `weight` is negative.
            FailedPreconditionError: A step is open already.
        """
        if op not in (ReduceOp.MEAN, ReduceOp.SUM) or not weight >= 0:
            raise InvalidArgumentError(f"Gradients need op MEAN or SUM and weight >= 0, got {op!r} and {weight!r}.")
        scale = weight if op is ReduceOp.MEAN else 1.0
        return _OpenStep(self, StepWeight(scale, not empty and scale > 0), op is ReduceOp.SUM, index)

    def begin_step(self, weight: StepWeight, adds_up: bool, index: int | None) -> None:
        """The block of a `step` is entered."""
        if self._weight is not None:
            raise FailedPreconditionError(
                f"Steps of one reducer must not nest, and step {self._num_steps} is open already. Leave that first."
            )
        self._weight = weight
        self._adds_up = adds_up
        self._num_steps = self._num_steps if index is None else index
        self._num_passes = 0
        self._twice_differentiable = False
        self._interception.__enter__()

    def end_step(self) -> None:
        """It is left."""
        self._interception.__exit__(None, None, None)
        self._num_steps += 1
        self._weight = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of `backward()` inside the block local; the next synchronised one sends them as well.

        Each is weighted with the weight of the step it happens in. Until then `.grad` holds this replica's own, and may
        only be zeroed or dropped. Hooks on parameters wait, too: they get the sum, once it is global.
        """
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def close(self) -> None:
        """Let go of the parameters. May be called twice."""
        self._parameters.close()

    def _backward(self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._in_hooks:
            raise FailedPreconditionError(
                "A hook on a parameter must not call backward(): its gradients would stay local. Call it after the "
                "backward() that runs the hook, or use torch.autograd.grad in the hook."
            )
        # A segment of a reentrant checkpoint is part of the pass that is under way.
        if self._inside or not self._parameters.all:
            original(*args, **kwargs)
            return
        if self._is_alone():
            self._alone(original, args, kwargs)
        else:
            self._exchanged(original, args, kwargs)

    def _alone(self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside = True
        try:
            original(*args, **kwargs)
        finally:
            self._inside = False

    def _exchanged(self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pass whose gradients are global at its end, or kept for one that is; one that fails changes none."""
        self._parameters.look()
        before = [parameter.grad for parameter in self._parameters.trained]
        earlier = {
            index: gradient
            for index, gradient in zip(self._parameters.indices, before, strict=True)
            if gradient is not None
        }
        hooks = HeldBack(self._parameters.hooked())
        self._inside = True
        try:
            for index in earlier:
                self._parameters.all[index].grad = None
            if self._local:
                original(*args, **kwargs)
                self._keep_local(earlier)
            else:
                self._synchronise(earlier, original, args, kwargs, hooks)
        except BaseException:
            for parameter, gradient in zip(self._parameters.trained, before, strict=True):
                parameter.grad = gradient
            raise
        finally:
            hooks.give_back()
            self._inside = self._in_hooks = False
            self._parameters.door.shut()

    def _is_alone(self) -> bool:
        """Whether gradients are global as torch leaves them: nobody has others, and nobody looks at them."""
        weight, policy = self._weight, self._policy
        if self._communicator.world_size > 1 or weight is None or (policy is not None and policy.looks):
            return False
        return weight.counts and weight.scale == 1.0

    def _synchronise(
        self,
        earlier: dict[int, torch.Tensor],
        original: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hooks: HeldBack,
    ) -> None:
        weight = self._weight_of_step()
        create_graph = bool(args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else kwargs.get("create_graph", False))
        parts = {index: self._accumulation.parts_of(index, gradient) for index, gradient in earlier.items()}
        self._num_passes += 1
        exchange = self._open_exchange(weight, kept=list(earlier.values()))
        for index, (_, contribution) in parts.items():
            if contribution is not None:
                exchange.preload(index, contribution)
        present = BackwardPass(self._communicator, exchange, weight, create_graph=create_graph)
        self._put_gradients(exchange, original, args, kwargs)
        new = present.finish()
        if self._policy is not None and self._policy.looks:
            self._look(self._policy, present, new)
        for_hooks = {index: new.pop(index) for index in tuple(new) if index in hooks.indices} if hooks.indices else {}
        self._show({index: base for index, (base, _) in parts.items()}, new)
        self._accumulation.forget(self._parameters.indices)
        self._appears_twice.update(exchange.late)
        self._twice_differentiable |= create_graph
        self._exchanges.done()
        if for_hooks:
            hooks.give_back()
            self._in_hooks = True
            # Torch brings each its gradient, in the same order on every rank, and calls the hooks on the way.
            parameters = tuple(self._parameters.all[index] for index in for_hooks)
            original(parameters, tuple(for_hooks.values()), create_graph=create_graph)

    def _open_exchange(self, weight: StepWeight, *, kept: Sequence[torch.Tensor]) -> BucketExchange:
        trained = self._parameters.indices
        # Collectives inside a second derivative run at places of their own: then no bucket may leave before the end.
        return self._exchanges.open(
            trained,
            self._parameters.all,
            PassStamp(self._num_steps, self._num_passes, adds_up=self._adds_up, updates=self._updates()),
            weight,
            kept=kept,
            held=trained if self._twice_differentiable else self._appears_twice,
        )

    def _put_gradients(
        self, exchange: BucketExchange, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run the pass: each gradient goes into the exchange as it appears, or all at the end if none leaves before."""
        door = self._parameters.door
        if exchange.leaves_at_end:
            door.gathering = True
            original(*args, **kwargs)
            exchange.put_all(self._parameters.take())
        else:
            door.receiver = self._exchanges.receiver
            original(*args, **kwargs)
        door.shut()

    def _look(self, policy: NonfinitePolicy, present: BackwardPass, new: dict[int, torch.Tensor]) -> None:
        """Before anybody sees what a pass brought, hooks that step an optimizer included."""
        brought = (self._parameters.all[index] for index in new)
        if policy.refuses(brought, new_are_finite=present.is_finite()):
            place = f"backward pass {self._num_passes} of batch {self._num_steps}"
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
        weight = self._weight_of_step()
        for index, parameter in zip(self._parameters.indices, self._parameters.trained, strict=True):
            gradient, new = earlier.get(index), parameter.grad
            if new is None or not weight.counts:
                parameter.grad = gradient
            else:
                parameter.grad = self._accumulation.add(index, gradient, new, weight.scale)

    def _weight_of_step(self) -> StepWeight:
        if self._weight is None:
            raise FailedPreconditionError(
                f"raydist bug: backward pass {self._num_passes} was synchronised outside of a step."
            )
        return self._weight

    def _stray(self, index: int, parameter: torch.nn.Parameter) -> None:
        if self._weight is not None and not self._inside:
            raise FailedPreconditionError(
                "Inside a step, gradients must come from `tensor.backward()` or `torch.autograd.backward(...)` called "
                f"on the thread that runs the step, or they would stay local, as that of parameter {index} of shape "
                f"{tuple(parameter.shape)}. Use torch.autograd.grad for local ones."
            )


@final
class _OpenStep:
    """The block of `GradientReducer.step`; by hand, as one is around every step of a program."""

    __slots__ = ("_how", "_reducer")

    def __init__(self, reducer: GradientReducer, *how: Any) -> None:
        self._reducer = reducer
        self._how = how

    def __enter__(self) -> None:
        self._reducer.begin_step(*self._how)

    def __exit__(self, *_: object) -> None:
        self._reducer.end_step()
