"""Gradients of one replica that are global when `backward()` returns.

While a step is open, every synchronised backward pass of its thread goes like this: what `.grad` held is set aside,
hooks hand each new gradient to a `BucketExchange` as it appears, and at the true end of the pass the reduced gradients
are added to what was set aside. So only new gradients are weighted and sent, however often a step calls `backward()`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch

from raydist.collectives.accumulation import LocalAccumulation, accumulate
from raydist.collectives.agreement import Agreement
from raydist.collectives.backward_pass import BackwardPass, StepWeight
from raydist.collectives.base import Communicator
from raydist.collectives.bucket_exchange import BucketExchange, allocate
from raydist.collectives.buckets import BucketLayout, ParameterSpec, plan_buckets
from raydist.collectives.interception import intercept_backward
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.values import ReduceOp

__all__ = ["GradientReducer"]

_MEGABYTE = 1 << 20


@final
class GradientReducer:
    """Reduces the gradients of one replica's parameters with those of its peers.

    Args:
        communicator: A group of its own: user-level collectives inside a backward pass must travel on another one.
        bucket_bytes: Gradients that travel together.
        first_bucket_bytes: Those that travel first.

    One backward pass costs one all-reduce per bucket and a small all-gather that finds ranks out of step.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_bytes: int = 25 * _MEGABYTE,
        first_bucket_bytes: int = _MEGABYTE,
    ) -> None:
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._parameters: list[torch.nn.Parameter] = []
        self._index: dict[int, int] = {}
        self._handles: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._layout = BucketLayout(())
        self._laid_out: tuple[int, ...] = ()
        self._buffers: list[torch.Tensor] = []
        self._accumulation = LocalAccumulation()
        self._appears_twice: set[int] = set()
        self._weight: StepWeight | None = None
        self._num_steps = 0
        self._num_passes = 0
        self._twice_differentiable = False
        self._local = False
        self._inside = False
        self._pass: BackwardPass | None = None

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Take charge of these parameters; those it has already are passed over.

        Args:
            parameters: In the same order on every rank.
        """
        for parameter in parameters:
            if id(parameter) not in self._index:
                self._index[id(parameter)] = len(self._parameters)
                self._parameters.append(parameter)

    @contextlib.contextmanager
    def step(
        self,
        *,
        weight: float = 1.0,
        op: ReduceOp = ReduceOp.MEAN,
        empty: bool = False,
        index: int | None = None,
    ) -> Iterator[None]:
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
        if self._weight is not None:
            raise FailedPreconditionError(
                f"Steps of one reducer must not nest, and step {self._num_steps} is open already. Leave that first."
            )
        if op not in (ReduceOp.MEAN, ReduceOp.SUM) or not weight >= 0:
            raise InvalidArgumentError(f"Gradients need op MEAN or SUM and weight >= 0, got {op!r} and {weight!r}.")
        scale = weight if op is ReduceOp.MEAN else 1.0
        self._weight = StepWeight(scale, counts=not empty and scale > 0)
        self._num_steps = self._num_steps if index is None else index
        self._num_passes = 0
        self._twice_differentiable = False
        try:
            with intercept_backward(self._backward):
                yield
        finally:
            self._num_steps += 1
            self._weight = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of `backward()` inside the block local; the next synchronised one sends them as well.

        Each is weighted with the weight of the step it happens in. Until then `.grad` holds this replica's own, and may
        only be zeroed or dropped.
        """
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def close(self) -> None:
        """Let go of the parameters. May be called twice."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._parameters.clear()
        self._index.clear()

    def _backward(self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside:
            # A segment of a reentrant checkpoint: part of the pass that is under way.
            original(*args, **kwargs)
            return
        before = {index: self._parameters[index].grad for index in self._watch()}
        self._inside = True
        try:
            self._set_gradients(dict.fromkeys(before))
            if self._local:
                original(*args, **kwargs)
                self._keep_local(before)
            else:
                create_graph = _argument(original, args, kwargs, "create_graph")
                self._synchronise(before, functools.partial(original, *args, **kwargs), create_graph=create_graph)
        except BaseException:
            self._set_gradients(before)
            self._buffers = []  # a collective under way may still write into them
            raise
        finally:
            self._inside = False
            self._pass = None

    def _synchronise(
        self, before: dict[int, torch.Tensor | None], run: Callable[[], None], *, create_graph: bool
    ) -> None:
        parts = {index: self._accumulation.parts_of(index, grad) for index, grad in before.items()}
        self._pass = BackwardPass(
            self._communicator, self._open_exchange(tuple(before)), self._open_step(), create_graph=create_graph
        )
        for index, (_, contribution) in parts.items():
            if contribution is not None:
                self._pass.exchange.preload(index, contribution)
        run()
        new = self._pass.finish()
        self._set_gradients(
            {
                index: accumulate(earlier, new[index]) if index in new else earlier
                for index, (earlier, _) in parts.items()
            }
        )
        self._accumulation.forget(parts)
        self._appears_twice.update(self._pass.exchange.late)
        self._twice_differentiable |= create_graph

    def _keep_local(self, before: dict[int, torch.Tensor | None]) -> None:
        weight = self._open_step()
        for index, gradient in before.items():
            new = self._parameters[index].grad
            if new is None or not weight.counts:
                self._parameters[index].grad = gradient
            else:
                self._parameters[index].grad = self._accumulation.add(index, gradient, new, weight.scale)

    def _open_exchange(self, trained: tuple[int, ...]) -> BucketExchange:
        if trained != self._laid_out:
            specs = [self._spec(index) for index in trained]
            self._layout = plan_buckets(
                specs, bucket_bytes=self._bucket_bytes, first_bucket_bytes=self._first_bucket_bytes
            )
            self._laid_out = trained
            self._buffers = []
        self._buffers = self._buffers or allocate(self._layout)
        # Collectives inside a second derivative run at places of their own: then no bucket may leave before the end.
        held = trained if self._twice_differentiable else self._appears_twice
        return BucketExchange(self._communicator, self._layout, self._buffers, held=held, agreement=self._agree())

    def _agree(self) -> Agreement | None:
        self._num_passes += 1
        if not self._parameters:
            return None
        numbers = {
            "step": self._num_steps,
            "backward pass": self._num_passes,
            "layout of trained parameters": self._layout.fingerprint,
        }
        return Agreement(self._communicator, "the backward pass", numbers, self._parameters[0].device)

    def _spec(self, index: int) -> ParameterSpec:
        parameter = self._parameters[index]
        return ParameterSpec(index, tuple(parameter.shape), parameter.dtype, parameter.device)

    def _open_step(self) -> StepWeight:
        if self._weight is None:
            raise FailedPreconditionError(
                f"raydist bug: backward pass {self._num_passes} was synchronised outside of a step."
            )
        return self._weight

    def _watch(self) -> list[int]:
        """Indices of the parameters that are trained now; each has a hook from its first time on."""
        trained = [index for index, parameter in enumerate(self._parameters) if parameter.requires_grad]
        for index in trained:
            if index not in self._handles:
                hook = functools.partial(_on_gradient, weakref.ref(self), index)
                self._handles[index] = self._parameters[index].register_post_accumulate_grad_hook(hook)
        return trained

    def _appeared(self, index: int) -> None:
        if self._pass is not None:
            self._pass.appeared(index, self._parameters[index])
        elif self._weight is not None and not self._inside:
            raise FailedPreconditionError(
                "Inside a step, gradients must come from `tensor.backward()` or `torch.autograd.backward(...)` called "
                f"on the thread that runs the step, or they would stay local, as that of parameter {index} of shape "
                f"{tuple(self._parameters[index].shape)}. Use torch.autograd.grad for local ones."
            )

    def _set_gradients(self, gradients: dict[int, torch.Tensor | None]) -> None:
        for index, gradient in gradients.items():
            self._parameters[index].grad = gradient


def _on_gradient(reducer: weakref.ref[GradientReducer], index: int, parameter: torch.Tensor) -> None:
    # The parameter holds the hook: a strong reference would keep reducer and model alive together.
    alive = reducer()
    if alive is not None:
        alive._appeared(index)


def _argument(function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> bool:
    return bool(inspect.signature(function).bind(*args, **kwargs).arguments.get(name))
