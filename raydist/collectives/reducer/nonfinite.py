"""Treatment of NaN and infinite gradients: none, an error, or a skipped optimizer step.

Replicas check reduced gradients, which are bitwise equal on all replicas. So all replicas decide the same without
communication. They communicate only to locate a NaN or an infinity that was found.

A skipped optimizer step runs with `.grad` set to None. torch's optimizers ignore a parameter without a gradient: they
change neither the parameter, nor its moments, nor its step count.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from raydist.core.errors import FailedPreconditionError

OnNonfinite = Literal["pass", "raise", "skip"]
ReplicaFaults = Sequence[Mapping[int, int]]
"""For each replica, by number of the parameter: the fault of the replica's own gradient, see `fault_of`."""

_FAULTS = {1: "infinite", 2: "NaN", 3: "NaN and infinite"}
_SHOWN = 4


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has neither NaN nor infinities. Usually reads the tensor once.

    >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    # NaN and infinities make the sum nonfinite, but a sum of finite values may overflow: then check each value.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def fault_of(gradient: torch.Tensor) -> int:
    """Return 0 for a finite gradient, 1 for one with infinities, 2 for one with NaN, 3 for both."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return int(torch.isinf(values).any()) + 2 * int(torch.isnan(values).any())


@final
class NonfinitePolicy:
    """Treatment of NaN and infinite gradients on one replica.

    Args:
        names: Returns names of parameters for error messages.
        first_replica: Number of the first replica of the process group.
    """

    def __init__(
        self, names: Callable[[Iterable[torch.nn.Parameter]], Sequence[str]], *, first_replica: int = 0
    ) -> None:
        self._first_replica = first_replica
        self.choice: OnNonfinite = "pass"  # treatment in the current run
        self.num_found = 0  # number of checked backward passes that had NaN or infinite gradients
        self._names = names
        self._last_is_nonfinite = False  # the last backward pass had NaN or infinite gradients
        self._suspects: set[int] = set()  # `id` of parameters whose gradients may still have NaN or infinities
        self._skipped = SkippedUpdates(self._must_skip)

    @property
    def num_skipped(self) -> int:
        """Number of calls of `optimizer.step()` that were skipped."""
        return self._skipped.count

    @property
    def counts(self) -> tuple[int, int]:
        """`num_found` and `num_skipped`, which are equal on all replicas; a new replica sets them."""
        return self.num_found, self.num_skipped

    @counts.setter
    def counts(self, counts: tuple[int, int]) -> None:
        self.num_found, self._skipped.count = counts

    @property
    def must_check(self) -> bool:
        """True if gradients must be checked."""
        return self.choice != "pass"

    @contextlib.contextmanager
    def run(self, choice: OnNonfinite) -> Iterator[None]:
        """Treat gradients by `choice` in one run of a step function, on the thread that calls optimizers."""
        self.choice = choice
        with self._skipped.watch() if choice == "skip" else contextlib.nullcontext():
            try:
                yield
            finally:
                self.choice = "pass"

    def record_pass(self, parameters: Iterable[torch.nn.Parameter], *, are_finite: bool) -> bool:
        """Record if a backward pass gave these parameters finite gradients. Return True if `error` must be raised."""
        must_raise = self.choice == "raise" and not are_finite
        self.num_found += not are_finite
        self._last_is_nonfinite = not (are_finite or must_raise)
        if self._last_is_nonfinite:
            self._suspects.update(map(id, parameters))
        return must_raise

    def record_more(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Record that the last pass gave these parameters NaN or infinite gradients, too; see `record_pass`."""
        if self._last_is_nonfinite:  # counted already
            self._suspects.update(map(id, parameters))
            return False
        return self.record_pass(parameters, are_finite=False)

    def _must_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the step of this optimizer must be skipped.

        After a backward pass with NaN or infinite gradients, all optimizers skip steps until the next backward pass.
        Later, an optimizer skips steps while one of its gradients still has a NaN or an infinity from that pass.
        """
        if self._last_is_nonfinite or not self._suspects:
            return self._last_is_nonfinite
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) in self._suspects:
                if parameter.grad is not None and not is_finite(parameter.grad):
                    return True
                self._suspects.discard(id(parameter))
        return False

    def error(
        self, place: str, faults: ReplicaFaults, parameters: Mapping[int, torch.nn.Parameter]
    ) -> FailedPreconditionError:
        """Return an error that names a backward pass, and the replicas and parameters with nonfinite gradients."""
        listed = [
            f"replica {rank}: {self._listed(own, parameters)}"
            for rank, own in enumerate(faults, self._first_replica)
            if own
        ]
        source = "; ".join(listed) or "no replica's own gradients, but their sum, which is too large for their dtype"
        return FailedPreconditionError(
            f'Gradients must be finite under RunOptions(on_nonfinite="raise"), got NaN or infinity in {place} from '
            f"{source}. Check the loss and the rows of that batch (a logarithm of 0, a division by 0, a loss scale too "
            'large for float16), or skip the optimizer steps of such batches with on_nonfinite="skip".'
        )

    def _listed(self, faults: Mapping[int, int], parameters: Mapping[int, torch.nn.Parameter]) -> str:
        shown = dict(list(faults.items())[:_SHOWN])
        names = self._names([parameters[index] for index in shown])
        listed = [f"{name} ({_FAULTS[fault]})" for name, fault in zip(names, shown.values(), strict=True)]
        return ", ".join(listed) + (f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")


_Call = tuple[tuple[Any, ...], dict[str, Any]]


@final
class SkippedUpdates:
    """The optimizer steps that are skipped, and their number.

    Args:
        must_skip: Returns True if the step of an optimizer must be skipped. Called when a step begins, and after each
            run of a step's closure.
    """

    def __init__(self, must_skip: Callable[[torch.optim.Optimizer], bool]) -> None:
        self.count = 0
        self._must_skip = must_skip
        self._counted = False
        self._hidden: dict[torch.Tensor, torch.Tensor] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Skip optimizer steps of this thread inside the block, including steps in hooks of backward passes."""
        with _LOCK:
            install_hooks()
            _WATCHING.append(self)
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            with _LOCK:
                _WATCHING.remove(self)
            self.restore_gradients()  # after a step that raised

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Hide gradients if the step must be skipped. Return replacement arguments for a step with a closure."""
        self.restore_gradients()
        self._counted = False
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._hide_gradients(optimizer)
            return None

        def wrapped() -> Any:  # the closure computes the gradients, so the decision follows each call of the closure
            self.restore_gradients()
            loss = closure()
            self._hide_gradients(optimizer)
            return loss

        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _hide_gradients(self, optimizer: Any) -> None:
        """Set `.grad` of the optimizer's parameters to None if the step must be skipped."""
        if not self._must_skip(optimizer):
            return
        self.count += not self._counted
        self._counted = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden[parameter], parameter.grad = parameter.grad, None

    def restore_gradients(self) -> None:
        """Restore hidden gradients."""
        for parameter, gradient in self._hidden.items():
            parameter.grad = gradient
        self._hidden.clear()


_LOCK = threading.Lock()
_WATCHING: list[SkippedUpdates] = []
_CURRENT: ContextVar[SkippedUpdates | None] = ContextVar("raydist_skipped_updates", default=None)


@functools.cache
def install_hooks() -> None:
    """Register hooks of torch around the steps of all optimizers of the process. Outside `watch` they take 0.2 us.

    The hooks are never removed: torch iterates over them in each step, and a change by another thread would raise.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _watcher() -> SkippedUpdates | None:
    """Return the object whose `watch` block the current step is in."""
    current, watching = _CURRENT.get(), tuple(_WATCHING)
    # The autograd engine runs hooks on GPU parameters in its own threads, for which Python creates dummy threads.
    if current is None and len(watching) == 1 and isinstance(threading.current_thread(), threading._DummyThread):
        return watching[0]
    return current


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    watcher = _watcher()
    return None if watcher is None else watcher.before_step(optimizer, args, kwargs)


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    watcher = _watcher()
    if watcher is not None:
        watcher.restore_gradients()
