"""Treatment of NaN and infinite gradients: none, an error, or a skipped optimizer step.

All replicas decide alike without communication, since they check reduced gradients, which are the same bits on every
replica. Replicas exchange the causes only once a NaN or an infinity is found.

A skipped optimizer step runs with `.grad` set to None: every optimizer of torch then ignores the parameter, without an
update, a moment, or a count of steps.
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
Accused = Sequence[Mapping[int, int]]
"""For each replica: number of a parameter -> fault of that replica's own gradient, see `fault_of`."""

_FAULTS = {1: "infinite", 2: "NaN", 3: "NaN and infinite"}
_SHOWN = 4


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has neither NaN nor infinities, usually in one pass over the tensor.

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
        self.choice: OnNonfinite = "pass"  # choice for the run that is open
        self.num_found = 0  # number of checked backward passes that had NaN or infinite gradients
        self._names = names
        self._last_was_bad = False
        self._spoilt: set[int] = set()  # `id` of parameters whose gradients may still hold NaN or infinities
        self._skipped = SkippedUpdates(self._must_skip)

    @property
    def num_skipped(self) -> int:
        """Number of calls of `optimizer.step()` that were skipped."""
        return self._skipped.count

    @property
    def looks(self) -> bool:
        """True if gradients must be checked."""
        return self.choice != "pass"

    @contextlib.contextmanager
    def run(self, choice: OnNonfinite) -> Iterator[None]:
        """Apply a choice to one run of a step function, on the thread that calls optimizers."""
        self.choice = choice
        with self._skipped.watch() if choice == "skip" else contextlib.nullcontext():
            try:
                yield
            finally:
                self.choice = "pass"

    def refuses(self, parameters: Iterable[torch.nn.Parameter], *, new_are_finite: bool) -> bool:
        """Record if a backward pass gave these parameters finite gradients. Return True if `error` must be raised."""
        refused = self.choice == "raise" and not new_are_finite
        self.num_found += not new_are_finite
        self._last_was_bad = not (new_are_finite or refused)
        if self._last_was_bad:
            self._spoilt.update(map(id, parameters))
        return refused

    def _must_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True after a bad pass: for all optimizers until the next pass, then while gradients stay nonfinite."""
        if self._last_was_bad or not self._spoilt:
            return self._last_was_bad
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) in self._spoilt:
                if parameter.grad is not None and not is_finite(parameter.grad):
                    return True
                self._spoilt.discard(id(parameter))
        return False

    def error(
        self, place: str, accused: Accused, parameters: Mapping[int, torch.nn.Parameter]
    ) -> FailedPreconditionError:
        """Return the error that names the backward pass, and the replicas and parameters with nonfinite gradients."""
        culprits = {rank: faults for rank, faults in enumerate(accused, self._first_replica) if faults}
        found = "; ".join(f"replica {rank}: {self._listed(faults, parameters)}" for rank, faults in culprits.items())
        said = found or "no replica's own, but their sum has infinities: they are too large for their dtype"
        return FailedPreconditionError(
            f'Gradients must be finite under RunOptions(on_nonfinite="raise"), got NaN or infinity in {place} from '
            f"{said}. Look at loss and rows of that batch there (a logarithm of 0, a division by 0, a loss scale too "
            'large for float16), or let on_nonfinite="skip" pass over such batches.'
        )

    def _listed(self, faults: Mapping[int, int], parameters: Mapping[int, torch.nn.Parameter]) -> str:
        shown = dict(list(faults.items())[:_SHOWN])
        names = self._names([parameters[index] for index in shown])
        listed = [f"{name} ({_FAULTS[fault]})" for name, fault in zip(names, shown.values(), strict=True)]
        return ", ".join(listed) + (f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")


_Call = tuple[tuple[Any, ...], dict[str, Any]]


@final
class SkippedUpdates:
    """Skips steps of optimizers, and counts them.

    Args:
        is_due: Returns True if the step of an optimizer must be skipped. Called when a step begins, and after each run
            of a closure.
    """

    def __init__(self, is_due: Callable[[torch.optim.Optimizer], bool]) -> None:
        self.count = 0
        self._is_due = is_due
        self._counted = False
        self._hidden: dict[torch.Tensor, torch.Tensor] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Apply to the optimizer steps of this thread inside the block, those in hooks of backward passes included."""
        with _LOCK:
            _install_hooks()
            _WATCHING.append(self)
        token = _MINE.set(self)
        try:
            yield
        finally:
            _MINE.reset(token)
            with _LOCK:
                _WATCHING.remove(self)
            self.show()  # after a step that raised

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Hide gradients if the step must be skipped. Return replacement arguments for a step with a closure."""
        self.show()
        self._counted = False
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._hide_if_due(optimizer)
            return None

        def seen() -> Any:  # the closure computes the gradients, so the decision follows each call of it
            self.show()
            loss = closure()
            self._hide_if_due(optimizer)
            return loss

        return ((args[0], seen, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": seen})

    def _hide_if_due(self, optimizer: Any) -> None:
        if not self._is_due(optimizer):
            return
        self.count += not self._counted
        self._counted = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden[parameter], parameter.grad = parameter.grad, None

    def show(self) -> None:
        """Restore hidden gradients."""
        for parameter, gradient in self._hidden.items():
            parameter.grad = gradient
        self._hidden.clear()


_LOCK = threading.Lock()
_WATCHING: list[SkippedUpdates] = []
_MINE: ContextVar[SkippedUpdates | None] = ContextVar("raydist_skipped_updates", default=None)


@functools.cache
def _install_hooks() -> None:
    """Register hooks of torch around the steps of all optimizers of the process. Without a watcher they take 0.2 us.

    Nothing removes them: torch iterates over them during a step, and a change by another thread would raise an error.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _watcher() -> SkippedUpdates | None:
    mine, watching = _MINE.get(), tuple(_WATCHING)
    # A thread that Python did not start is one of the autograd engine, which runs hooks on parameters of a GPU.
    if mine is None and len(watching) == 1 and isinstance(threading.current_thread(), threading._DummyThread):
        return watching[0]
    return mine


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    watcher = _watcher()
    return None if watcher is None else watcher.before_step(optimizer, args, kwargs)


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    watcher = _watcher()
    if watcher is not None:
        watcher.show()
