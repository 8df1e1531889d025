"""The gradient reducer of one replica: gradients are global when `backward()` returns.

While a step is open, every backward pass on its thread is synchronised (`passes.py`), or local inside `no_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.buckets import Buckets
from raydist.collectives.reducer.exchange import StepWeight
from raydist.collectives.reducer.interception import begin_interception, end_interception
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.collectives.reducer.parameter_hooks import TrainedParameters
from raydist.collectives.reducer.passes import EngineCall, SynchronisedPasses
from raydist.collectives.reducer.trailer import Updates
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.values import ReduceOp

__all__ = ["WIRES", "GradientReducer"]

_MEGABYTE = 1 << 20
WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Communication dtype of float32 gradients, by the names of `CommunicationOptions.compression`."""


def _by_shape(parameters: Iterable[torch.nn.Parameter]) -> list[str]:
    return [f"a parameter of shape {tuple(parameter.shape)}" for parameter in parameters]


@final
class GradientReducer:
    """Reducer of gradients over all replicas, for the parameters of one replica.

    Args:
        communicator: A communicator for the reducer alone, since backward passes may contain user collectives.
        bucket_bytes: Maximum size of a bucket.
        first_bucket_bytes: Size of the first bucket.
        updates: Returns this rank's optimizer updates, which must be the same on all ranks.
        calls: Returns a digest of this rank's user collectives, which must be the same on all ranks.
        policy: Treatment of NaN and infinite gradients; None for none.
        compression: Communication dtype of float32 gradients, "fp16" or "bf16"; None to keep float32.
        expect_rows: Returns the `id` of each parameter whose gradient will be sparse, for the same parameters on all
            ranks. Further sparse gradients are detected in the first pass; ones that appear later become dense.
        names: Returns names of parameters for error messages.

    One backward pass costs one all-reduce per bucket. Afterwards `.grad` holds views of the reduced buckets.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_bytes: int = 25 * _MEGABYTE,
        first_bucket_bytes: int = _MEGABYTE,
        updates: Callable[[], Updates] = Updates,
        calls: Callable[[], int] = int,
        policy: NonfinitePolicy | None = None,
        compression: Literal["fp16", "bf16"] | None = None,
        expect_rows: Callable[[], Collection[int]] = tuple,
        names: Callable[[Iterable[torch.nn.Parameter]], Sequence[str]] = _by_shape,
    ) -> None:
        self._policy = policy
        self._communicator = communicator
        buckets = Buckets(
            communicator,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            compression=None if compression is None else WIRES[compression],
            expect_rows=expect_rows,
        )
        self._parameters = TrainedParameters(self._stray)
        self._passes = SynchronisedPasses(communicator, buckets, self._parameters, updates, calls, policy, names)
        self._weight: StepWeight | None = None
        self._num_steps = 0
        self._local = False
        self._inside = False
        self._intercepted: Any = None

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Reduce the gradients of these parameters from now on, and of no others.

        Args:
            parameters: In the same order on every rank. Giving the same tuple again costs nothing.
        """
        self._parameters.attach(parameters)
        self._passes.known.keep_only(self._parameters.all.values())

    def note_gradients(self) -> None:
        """Record that `.grad` of all parameters is the same on all replicas now, as sent by the driver."""
        self._passes.known.note(self._parameters.all.values())

    def note_cleared(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Record that the program has set the gradients of these parameters to None or zero."""
        self._passes.known.note_cleared(parameters)

    def make_global(
        self, parameters: Collection[torch.nn.Parameter], *, used: bool = True, batch_ends: bool = False
    ) -> bool:
        """Exchange the gradients of these parameters that no backward pass has made global.

        A program makes such gradients with `torch.autograd.grad` or `torch.func` and puts them into `.grad`. The
        reducer weights them like gradients of a backward pass, and writes the result into the tensors that `.grad`
        holds. Where all gradients are global, the call takes 0.2 us per parameter.

        Args:
            parameters: Parameters of an optimizer.
            used: An optimizer uses the gradients now. Whatever the program puts into `.grad` afterwards counts as new.
            batch_ends: The batch ends. The weight of the next batch may differ, so its gradients are exchanged now.

        Returns:
            True if this replica had gradients made by hand, which were exchanged.

        Blocking: where gradients are exchanged, until all ranks make this call or run a backward pass.

        Raises:
            CollectiveMismatchError: Another rank runs a backward pass. All ranks raise it.
            FailedPreconditionError: The reduction is SUM, and a gradient may be global already.
        """
        if self._communicator.world_size == 1 or self._inside:  # inside a pass, hooks see global gradients
            return False
        self._inside = True
        try:
            return self._passes.exchange_made_by_hand(parameters, used=used, filled_anew=not batch_ends)
        finally:
            self._inside = False
            if batch_ends:
                self._passes.known.end_batch()

    @contextmanager
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
            op: MEAN sums weighted gradients, SUM unweighted ones.
            empty: The replica has no rows; its gradients count as zero even if they are NaN.
            index: Number of the step, for ranks that do not all start with the first step; None to count up by one.

        Raises:
            InvalidArgumentError: `op` is neither MEAN nor SUM, or `weight` is negative.
            FailedPreconditionError: A step is open already.
        """
        self.begin_step(self.weigh(weight, op, empty=empty), op is ReduceOp.SUM, index)
        try:
            yield
        finally:
            self.end_step()

    @staticmethod
    def weigh(weight: float, op: ReduceOp, *, empty: bool) -> StepWeight:
        """Return the weight of gradients in a step with these arguments; see `step`."""
        if op not in (ReduceOp.MEAN, ReduceOp.SUM) or not weight >= 0:
            raise InvalidArgumentError(f"Gradients need op MEAN or SUM and weight >= 0, got {op!r} and {weight!r}.")
        scale = weight if op is ReduceOp.MEAN else 1.0
        return StepWeight(scale, not empty and scale > 0)

    def begin_step(self, weight: StepWeight, adds_up: bool, index: int | None = None) -> None:
        """Open a step, as `step` does on entry; `end_step` closes it."""
        if self._weight is not None:
            raise FailedPreconditionError(
                f"Steps of one reducer must not nest, and step {self._num_steps} is open already. Leave that first."
            )
        self._weight = weight
        self._num_steps = self._num_steps if index is None else index
        self._passes.begin_step(self._num_steps, weight, adds_up=adds_up)
        self._intercepted = begin_interception(self._backward)

    def end_step(self) -> None:
        """Close the open step."""
        end_interception(self._intercepted)
        self._num_steps += 1
        self._weight = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of `backward()` inside the block local until the next synchronised `backward()`.

        Each gradient has the weight of the step in which it is computed. Meanwhile `.grad` holds this replica's own
        gradients and may only be zeroed or dropped. Hooks on parameters run later, on the global sum.
        """
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def close(self) -> None:
        """Detach from the parameters. May be called twice."""
        self._parameters.close()

    def _backward(self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._passes.in_hooks:
            raise FailedPreconditionError(
                "A hook on a parameter must not call backward(): its gradients would stay local. Call it after the "
                "backward() that runs the hook, or use torch.autograd.grad in the hook."
            )
        # The nested backward pass of a reentrant checkpoint belongs to the running pass.
        if self._inside:
            self._passes.begin_segment()
        if self._inside or not self._parameters.all:
            original(*args, **kwargs)
            return
        self._inside = True
        try:
            if self._is_alone():
                original(*args, **kwargs)
            else:
                self._passes.run(EngineCall(original, args, kwargs), local=self._local)
        finally:
            self._inside = False

    def _is_alone(self) -> bool:
        """Return True if torch's own gradients are the result: one rank, weight 1, no check for NaN and infinities."""
        weight, policy = self._weight, self._policy
        if self._communicator.world_size > 1 or weight is None or (policy is not None and policy.looks):
            return False
        return weight.counts and weight.scale == 1.0

    def _stray(self, index: int, parameter: torch.nn.Parameter) -> None:
        if self._weight is not None and not self._inside:
            raise FailedPreconditionError(
                "Inside a step, gradients must come from `tensor.backward()` or `torch.autograd.backward(...)` called "
                f"on the thread that runs the step, or they would stay local, as that of parameter {index} of shape "
                f"{tuple(parameter.shape)}. Use torch.autograd.grad for local ones."
            )
