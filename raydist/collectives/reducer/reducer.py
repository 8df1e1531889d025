"""The gradient reducer of one replica. After `backward()`, `.grad` is the weighted sum over all replicas.

Such a gradient is called *global*. While a step is open, every backward pass on the step's thread is synchronised, or
local inside `no_sync`. A synchronised pass removes earlier gradients from `.grad`, puts each new gradient into an
`Exchange`, and finally adds the reduced gradients to the earlier ones. So the reducer weights and sends each gradient
once, however often a step calls `backward()`.

The program's hooks on parameters must see global gradients, so a pass defers these hooks. Then a second, short pass of
the autograd engine gives each parameter with a hook its global gradient: torch calls the hooks, handles the values that
they return, and adds to `.grad`. One difference to torch alone: if several segments of a reentrant checkpoint use a
parameter, its hooks run once, with the sum, and not once per segment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.buckets import Buckets
from raydist.collectives.reducer.exchange import Exchange, StepWeight, TrailerChecks
from raydist.collectives.reducer.known_gradients import (
    Checksums,
    KnownGradients,
    LocalAccumulation,
    accumulate,
    combined,
)
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.collectives.reducer.parameter_hooks import (
    DeferredHooks,
    TrainedParameters,
    begin_interception,
    end_interception,
    hooked_of,
)
from raydist.collectives.reducer.trailer import Updates, encode_stamp
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.values import ReduceOp

_MEGABYTE = 1 << 20
_CREATE_GRAPH = 3  # position of the argument `create_graph` of `torch.autograd.backward`
WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Communication dtype of float32 gradients, by the names of `CommunicationOptions.compression`."""


def _by_shape(parameters: Iterable[torch.nn.Parameter]) -> list[str]:
    return [f"a parameter of shape {tuple(parameter.shape)}" for parameter in parameters]


@final
class GradientReducer:
    """A reducer of gradients over all replicas, for the parameters of one replica.

    Args:
        communicator: A communicator that nothing else uses, since backward passes may contain user collectives.
        first_bucket_bytes: Size of the first bucket.
        updates: Returns this rank's optimizer updates, which must be the same on all ranks.
        calls: Returns a digest of this rank's user collectives, which must be the same on all ranks.
        compression: Communication dtype of float32 gradients, "fp16" or "bf16"; None to keep float32.
        expect_rows: Returns the `id` of each parameter whose gradient will be sparse; all ranks must name the same
            parameters. The first pass detects other sparse gradients. Gradients that turn sparse later become dense.
        names: Returns names of parameters for error messages.
        on_pass: Called at the start of each backward pass, with True if there are earlier gradients.
        end_pass: Called at the end of each backward pass, with True if its gradients stay local.

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
        on_pass: Callable[[bool], None] = lambda _: None,
        end_pass: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._communicator = communicator
        self._buckets = Buckets(
            communicator,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            compression=None if compression is None else WIRES[compression],
            expect_rows=expect_rows,
        )
        self._updates = updates
        self._calls = calls
        self._policy = policy
        self._on_pass = on_pass
        self._end_pass = end_pass
        self._parameters = TrainedParameters(self._reject_stray)
        self._known = KnownGradients()
        self._changed: list[Checksums] = []
        self._accumulation = LocalAccumulation()
        self._repeated: set[int] = set()
        self._weight = StepWeight(1.0, counts=True)
        self._adds_up = False
        self._is_open = False
        self._num_steps = 0
        self._num_passes = 0
        self._twice_differentiable = False
        self._local = False
        self._inside = False
        self._in_hooks = False
        self._exchange: Exchange | None = None
        self._trailers = TrailerChecks(communicator, lambda index: names([self._parameters.all[index]])[0])
        self._intercepted: Any = None

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Reduce the gradients of exactly these parameters from now on. The order must be the same on every rank.

        A repeated call with the same tuple takes no time.
        """
        self._parameters.attach(parameters)
        self._known.keep_only(self._parameters.all.values())

    def note_gradients(self) -> None:
        """Record that `.grad` of all parameters is the same on all replicas now, as sent by the driver."""
        self._known.note(self._parameters.all.values())

    def note_cleared(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Record that the program has set the gradients of these parameters to None or zero."""
        self._known.note_cleared(parameters)

    @property
    def holds_local_gradients(self) -> bool:
        """True if gradients of `no_sync` wait to be exchanged."""
        return bool(self._accumulation) and any(map(self._is_local, self._parameters.all.values()))

    def make_global(
        self, parameters: Collection[torch.nn.Parameter], *, used: bool = True, batch_ends: bool = False
    ) -> bool:
        """Exchange the gradients of these parameters that the program has made by hand.

        A program makes gradients by hand with `torch.autograd.grad` or `torch.func`, and puts them into `.grad`. The
        reducer weights them like gradients of a backward pass, and writes the result into the tensors that `.grad`
        holds. If all gradients are global, the call takes 0.2 us per parameter.

        Args:
            parameters: Parameters of an optimizer.
            used: An optimizer uses the gradients now. A gradient that the program puts into `.grad` later is new.
            batch_ends: The batch ends. Exchange its gradients now, because the next batch may have another weight.

        Returns:
            True if this replica had gradients made by hand.

        Blocking: if gradients are exchanged, until all ranks make this call or run a backward pass.

        Raises:
            CollectiveMismatchError: Another rank runs a backward pass. All ranks raise it.
            FailedPreconditionError: The reduction is SUM, and a gradient may be global already.
        """
        if self._communicator.world_size == 1 or self._inside:  # a hook inside a pass sees global gradients
            return False
        made = self._made_by_hand(parameters, filled_anew=not batch_ends)
        # Gradients of no_sync() stay local when a batch ends. The next backward pass or optimizer step exchanges them.
        if made or (not batch_ends and self._accumulation and any(map(self._is_local, parameters))):
            self._inside = True
            try:
                self._exchange_made_by_hand(made)
            finally:
                self._inside = False
        if used:
            self._known.note_used(parameters)
        if batch_ends:
            self._known.end_batch()
        return bool(made)

    @contextmanager
    def step(
        self, *, weight: float = 1.0, op: ReduceOp = ReduceOp.MEAN, empty: bool = False, index: int | None = None
    ) -> Iterator[None]:
        """Reduce the gradients of every `backward()` that this thread calls inside the block.

        Args:
            weight: For MEAN: this replica's share of the global batch's rows, n_i / n.
            op: MEAN sums weighted gradients, SUM sums gradients without weights.
            empty: The replica has no rows. Its gradients count as zero, even if they are NaN.
            index: Number of the step; None for the number of the last step plus one.
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
        """Open a step, like `step` on entry; `adds_up` is True for SUM. `end_step` closes the step."""
        if self._is_open:
            raise FailedPreconditionError(
                f"Steps of one reducer must not nest, but step {self._num_steps} is open already. Close it first."
            )
        self._is_open = True
        self._weight = weight
        self._num_steps = self._num_steps if index is None else index
        self._adds_up = adds_up
        self._num_passes = 0
        self._twice_differentiable = False
        self._intercepted = begin_interception(self._backward)

    def end_step(self) -> None:
        end_interception(self._intercepted)
        self._num_steps += 1
        self._is_open = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of `backward()` inside the block local until the next synchronised `backward()`.

        Each gradient gets the weight of the step that computes it. Until that `backward()`, `.grad` holds this
        replica's own gradients, and the program may only set it to zero or None. Hooks on parameters run with that
        `backward()`, on the global sum.
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
        if self._in_hooks:
            raise FailedPreconditionError(
                "A hook on a parameter must not call backward(): its gradients would stay local. Call backward() "
                "after the backward() that runs the hook, or use torch.autograd.grad in the hook."
            )
        if self._exchange is not None:
            # A reentrant checkpoint runs this nested backward pass as part of the outer pass. A parameter may now get
            # several gradients, so the outer pass sends the remaining buckets at its end.
            self._exchange.hold()
        if self._inside:
            original(*args, **kwargs)
            return
        self._inside = True
        try:
            if not self._parameters.all or self._needs_no_reduction():
                original(*args, **kwargs)
                if self._policy is not None and self._policy.must_check:
                    self._policy.record_pass((), are_finite=True)
            else:
                self._run(original, args, kwargs)
            self._end_pass(self._local)
        finally:
            self._inside = False

    def _needs_no_reduction(self) -> bool:
        """Return True if torch's gradients are the result: one rank, weight 1, no check for NaN and infinities."""
        must_check = self._policy is not None and self._policy.must_check
        return self._communicator.world_size == 1 and not must_check and self._weight == StepWeight(1.0, counts=True)

    def _reject_stray(self, index: int, parameter: torch.nn.Parameter) -> None:
        if self._is_open and not self._inside:
            raise FailedPreconditionError(
                "Inside a step, gradients must come from `tensor.backward()` or `torch.autograd.backward(...)` called "
                f"on the thread that runs the step, got a gradient from elsewhere for parameter {index} of shape "
                f"{tuple(parameter.shape)}, which would stay local. Use torch.autograd.grad for local gradients."
            )

    def _run(
        self, original: Callable[..., None] | None, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Run a synchronised pass, or a local pass in `no_sync`. A pass that fails leaves `.grad` unchanged.

        `original` is `torch.autograd.backward`. None exchanges gradients made by hand, for which no hooks run.

        Blocking: until all ranks have ended their pass, at most the communicator's limit. On a GPU, the host waits only
        if this rank lacks a gradient, or if gradients are checked for NaN and infinities.
        """
        given = kwargs or {}
        create_graph = bool(args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else given.get("create_graph", False))
        self._parameters.look()
        indices, trained = self._parameters.indices, self._parameters.trained
        before = [parameter.grad for parameter in trained]
        earlier = {index: each for index, each in zip(indices, before, strict=True) if each is not None}
        self._on_pass(bool(earlier))
        hooks = DeferredHooks({} if original is None else hooked_of(zip(indices, trained, strict=True)))
        try:
            made = self._take_made_by_hand(earlier) if earlier and self._communicator.world_size > 1 else {}
            for index in earlier:
                self._parameters.all[index].grad = None
            if original is not None and self._local:
                original(*args, **given)
                self._keep_local(earlier)
            else:
                parts = {index: self._accumulation.parts_of(index, gradient) for index, gradient in earlier.items()}
                contributions = {index: part for index, (_, part) in parts.items() if part is not None}
                run = None if original is None else functools.partial(original, *args, **given)
                new = self._synchronised(run, contributions, create_graph=create_graph)
                self._accumulation.forget(indices)
                for_hooks = self._set_gradients({index: base for index, (base, _) in parts.items()}, new, hooks.indices)
                if for_hooks and original is not None:
                    hooks.give_back()
                    self._in_hooks = True
                    # This pass of torch calls the hooks, and accumulates the gradients in the same order on every rank.
                    parameters = tuple(self._parameters.all[index] for index in for_hooks)
                    original(parameters, tuple(for_hooks.values()), create_graph=create_graph)
                self._known.note([self._parameters.all[index] for index in new], by_hand=original is None)
                if made:
                    self._known.note([self._parameters.all[index] for index in made], by_hand=True)
        except BaseException:
            for parameter, gradient in zip(trained, before, strict=True):
                parameter.grad = gradient
            raise
        finally:
            hooks.give_back()
            self._in_hooks = False
            self._exchange = None
            self._parameters.sink.receiver = None

    def _synchronised(
        self, run: Callable[[], None] | None, contributions: dict[int, torch.Tensor], *, create_graph: bool
    ) -> dict[int, torch.Tensor]:
        """Run a pass. Return, by index of the parameter, the new global gradients: those that any replica has."""
        noted, self._changed = self._changed, []
        exchange = self._exchange = self._begin_exchange(combined(noted), contributions)
        if run is not None:
            self._parameters.sink.receiver = exchange.put
            run()
            self._parameters.sink.receiver = None
        exchange.finish()
        found = exchange.gradients(self._trailers.check(exchange, noted, wait=create_graph))
        if create_graph:
            found = {index: exchange.connected(index, gradient) for index, gradient in found.items()}
        self._repeated |= exchange.repeated
        self._twice_differentiable |= create_graph
        if self._policy is not None and self._policy.must_check:
            self._check_finite(self._policy, exchange, found)
        return found

    def _begin_exchange(self, checksum: torch.Tensor | None, contributions: dict[int, torch.Tensor]) -> Exchange:
        self._num_passes += 1
        parameters, place = self._parameters, (self._num_steps, self._num_passes)
        plan = self._buckets.begin_pass(parameters.kinds, parameters.all, *place)
        return Exchange(
            self._communicator,
            self._buckets,
            plan,
            encode_stamp(*place, adds_up=self._adds_up, updates=self._updates(), calls=self._calls()),
            checksum,
            self._weight,
            earlier=contributions,
            # A double backward calls all_reduce inside the pass, so no bucket may be sent before the end of the pass.
            hold_with=parameters.indices if self._twice_differentiable else self._repeated,
        )

    def _check_finite(self, policy: NonfinitePolicy, exchange: Exchange, new: dict[int, torch.Tensor]) -> None:
        """Check gradients for NaN and infinities before hooks and optimizers see them."""
        parameters = (self._parameters.all[index] for index in new)
        if policy.record_pass(parameters, are_finite=exchange.is_finite()):
            place = f"backward pass {self._num_passes} of batch {self._num_steps}"
            raise policy.error(place, exchange.locate_faults(self._parameters.indices), self._parameters.all)

    def _set_gradients(
        self, earlier: dict[int, torch.Tensor | None], new: dict[int, torch.Tensor], hooked: Collection[int]
    ) -> dict[int, torch.Tensor]:
        """Set `.grad` to the sum of earlier and new gradients. Return the new ones of parameters with hooks instead."""
        parameters = self._parameters.all
        for index, gradient in new.items():
            if index not in hooked:
                base = earlier.get(index)
                parameters[index].grad = gradient if base is None else accumulate(base, gradient)
        for index in earlier.keys() - (new.keys() - set(hooked)):
            parameters[index].grad = earlier[index]
        return {index: new[index] for index in hooked if index in new}

    def _keep_local(self, earlier: dict[int, torch.Tensor]) -> None:
        for index, parameter in zip(self._parameters.indices, self._parameters.trained, strict=True):
            gradient, new = earlier.get(index), parameter.grad
            if new is None or not self._weight.counts:
                parameter.grad = gradient
            else:
                parameter.grad = self._accumulation.add(index, gradient, new, self._weight.scale)

    def _exchange_made_by_hand(self, made: dict[int, torch.Tensor]) -> None:
        """Run a pass that exchanges only gradients made by hand, and write the result into the program's tensors."""
        parameters = [self._parameters.all[index] for index in made]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        for parameter in frozen:  # only trained parameters have a slot in a bucket
            parameter.requires_grad_(True)
        try:
            for index, gradient in made.items():
                self._parameters.all[index].grad = self._as_local(index, gradient)
            self._run(None)
            for parameter, gradient in zip(parameters, made.values(), strict=True):
                parameter.grad = _write_into(gradient, parameter.grad)
            self._known.note(parameters, by_hand=True)  # `.grad` is another tensor now
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _take_made_by_hand(self, earlier: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Add the gradients of `earlier` that were made by hand to the local accumulation, and return them."""
        made = self._made_by_hand([self._parameters.all[index] for index in earlier], filled_anew=False)
        for index, gradient in made.items():
            local = self._as_local(index, gradient)
            if local is None:
                del earlier[index]
                self._parameters.all[index].grad = None
            else:
                earlier[index] = local
        return made

    def _is_local(self, parameter: torch.nn.Parameter) -> bool:
        index = self._parameters.number_of(parameter)
        return index is not None and parameter.grad is not None and self._accumulation.holds(index, parameter.grad)

    def _made_by_hand(self, parameters: Iterable[torch.nn.Parameter], *, filled_anew: bool) -> dict[int, torch.Tensor]:
        """Return the gradients that the program has made by hand, by number. Record changed global gradients."""
        made: dict[int, torch.Tensor] = {}
        changed: dict[int, torch.Tensor] = {}
        for parameter in self._known.unknown(parameters):
            index, gradient = self._parameters.number_of(parameter), parameter.grad
            if index is None or gradient is None or self._accumulation.holds(index, gradient):
                continue
            by_hand = self._known.is_made_by_hand(parameter, adds_up=self._adds_up, filled_anew=filled_anew)
            (made if by_hand else changed)[index] = gradient
        if changed:
            self._changed.append(Checksums(changed))
            self._known.note_changed(self._parameters.all[index] for index in changed)
        return made

    def _as_local(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add the new part of a gradient made by hand to the local accumulation, with the weight of this batch.

        Return the new `.grad`. It is None if this replica's gradients count as zero and there is no global part.
        """
        base = self._known.base_of(self._parameters.all[index])
        if not self._weight.counts:
            return base
        new = gradient if base is None else gradient.detach() - base
        self._accumulation.forget((index,))
        return self._accumulation.add(index, base, new, self._weight.scale, by_hand=True)


def _write_into(made: torch.Tensor, reduced: torch.Tensor | None) -> torch.Tensor | None:
    """Copy `reduced` into the program's own tensor, and return that tensor.

    The program may fill its tensor again later, for example a view of a larger one. Return `reduced` if the copy fails.
    """
    if reduced is None or made.requires_grad or made.layout is not reduced.layout or made.is_sparse:
        return reduced
    try:
        with torch.no_grad():
            return made.copy_(reduced)
    except RuntimeError:  # an expanded tensor, or a tensor of inference mode
        return reduced
