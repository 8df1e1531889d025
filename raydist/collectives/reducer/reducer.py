"""Gradients of one replica that are global when `backward()` returns.

While a step is open, every backward pass that its thread calls is a synchronised one (`synchronised_passes.py`), or a
local one inside `no_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.buckets import Buckets
from raydist.collectives.reducer.exchange import StepWeight
from raydist.collectives.reducer.interception import Interception
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.collectives.reducer.parameter_hooks import TrainedParameters
from raydist.collectives.reducer.passes import EngineCall, SynchronisedPasses
from raydist.collectives.reducer.trailer import Updates
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.values import ReduceOp

__all__ = ["WIRES", "GradientReducer"]

_MEGABYTE = 1 << 20
WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""What float32 travels as, by the names of `CommunicationOptions.compression`."""


def _by_shape(parameters: Iterable[torch.nn.Parameter]) -> list[str]:
    return [f"a parameter of shape {tuple(parameter.shape)}" for parameter in parameters]


@final
class GradientReducer:
    """Reduces the gradients of one replica's parameters with those of its peers.

    Args:
        communicator: A group of its own: user-level collectives inside a backward pass must travel on another one.
        bucket_bytes: Gradients that travel together.
        first_bucket_bytes: Those that travel first.
        updates: What this rank has done with earlier gradients: must be the same on all.
        calls: A digest of the user collectives that this rank has called: must be the same on all.
        policy: What NaN and infinities do; None for nothing.
        compression: What float32 gradients travel as, "fp16" or "bf16"; None for what they are.
        expect_rows: Identities of parameters whose gradients will be sparse, the same on all ranks; others that turn
            out to be are found in their first pass.
        names: Of parameters, for messages.

    One backward pass costs one all-reduce per bucket. What `.grad` holds afterwards is the memory that was reduced.
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
        self._interception = Interception(self._backward)

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Take charge of these parameters, and of no others any more.

        Args:
            parameters: In the same order on every rank. Giving the same tuple again costs nothing.
        """
        self._parameters.attach(parameters)
        self._passes.known.keep_only(self._parameters.all.values())

    def note_gradients(self) -> None:
        """What `.grad` of all parameters holds now is the same on all replicas: the driver has sent it."""
        self._passes.known.note(self._parameters.all.values())

    def note_cleared(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The program has set the gradients of these parameters to None or zero."""
        self._passes.known.note_cleared(parameters)

    def make_global(
        self, parameters: Collection[torch.nn.Parameter], *, used: bool = True, batch_ends: bool = False
    ) -> bool:
        """Exchange the gradients of these parameters that no backward pass has made global.

        A program makes such gradients with `torch.autograd.grad` or `torch.func` and puts them into `.grad`. They are
        weighted as those of a backward pass. The result is written into the tensors that `.grad` holds. Takes 0.2 us a
        parameter where all gradients are global.

        Args:
            parameters: Those of an optimizer.
            used: An optimizer uses the gradients now. What the program puts into `.grad` afterwards counts as new.
            batch_ends: The next batch may weigh gradients otherwise, so that those of this one are exchanged now.

        Returns:
            True if something was exchanged.

        Blocking: where something is exchanged, until all ranks are here or in a backward pass.

        Raises:
            CollectiveMismatchError: On every rank alike: another rank is in a backward pass.
            FailedPreconditionError: Gradients are added up, and one may be global already.
        """
        if self._communicator.world_size == 1 or self._inside:  # in a pass, hooks see global gradients
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
            op: MEAN adds up weighted gradients, SUM plain ones.
            empty: The replica has no rows: its gradients count as zero, whatever they are (NaN included).
            index: Number of the step, for ranks that do not all start with the first; None counts by itself.

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
        """What gradients of a step with these arguments are multiplied with; see `step`."""
        if op not in (ReduceOp.MEAN, ReduceOp.SUM) or not weight >= 0:
            raise InvalidArgumentError(f"Gradients need op MEAN or SUM and weight >= 0, got {op!r} and {weight!r}.")
        scale = weight if op is ReduceOp.MEAN else 1.0
        return StepWeight(scale, not empty and scale > 0)

    def begin_step(self, weight: StepWeight, adds_up: bool, index: int | None = None) -> None:
        """Enter the block of a `step` by hand, until `end_step`: one is around every step of a program."""
        if self._weight is not None:
            raise FailedPreconditionError(
                f"Steps of one reducer must not nest, and step {self._num_steps} is open already. Leave that first."
            )
        self._weight = weight
        self._num_steps = self._num_steps if index is None else index
        self._passes.begin_step(self._num_steps, weight, adds_up=adds_up)
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
        self._interception.close()

    def _backward(self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._passes.in_hooks:
            raise FailedPreconditionError(
                "A hook on a parameter must not call backward(): its gradients would stay local. Call it after the "
                "backward() that runs the hook, or use torch.autograd.grad in the hook."
            )
        # A segment of a reentrant checkpoint is part of the pass that is under way.
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
        """Whether gradients are global as torch leaves them: nobody has others, and nobody looks at them."""
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
