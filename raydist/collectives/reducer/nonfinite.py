"""Treatment of NaN and infinite gradients: none, an error, or a skipped optimizer step.

All replicas decide alike without communication, since they check reduced gradients, which are the same bits on every
replica. Replicas exchange the causes only once a NaN or an infinity is found.

A skipped optimizer step runs with `.grad` set to None: every optimizer of torch then ignores the parameter, without an
update, a moment, or a count of steps.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from raydist.errors import FailedPreconditionError

__all__ = ["NonfinitePolicy", "OnNonfinite", "SkippedUpdates", "fault_of", "is_finite"]

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

    Attributes:
        choice: Choice for the run that is open.
        num_found: Number of checked backward passes that had NaN or infinite gradients.
    """

    def __init__(
        self, names: Callable[[Iterable[torch.nn.Parameter]], Sequence[str]], *, first_replica: int = 0
    ) -> None:
        self._first_replica = first_replica
        self.choice: OnNonfinite = "pass"
        self.num_found = 0
        self._names = names
        self._last_was_bad = False
        self._spoilt: dict[int, weakref.ref[torch.nn.Parameter]] = {}
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
        """Record the result of a backward pass. Return True if the caller must raise an `error`.

        Args:
            parameters: The parameters that have got gradients in the pass.
            new_are_finite: True if the reduced gradients of the pass are finite.
        """
        refused = self.choice == "raise" and not new_are_finite
        self.num_found += not new_are_finite
        self._last_was_bad = not (new_are_finite or refused)
        if self._last_was_bad:
            self._spoilt.update((id(parameter), weakref.ref(parameter)) for parameter in parameters)
        return refused

    def _must_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True after a bad pass: for all optimizers until the next pass, then while gradients stay nonfinite."""
        if self._last_was_bad or not self._spoilt:
            return self._last_was_bad
        return any(self._is_spoilt(parameter) for group in optimizer.param_groups for parameter in group["params"])

    def _is_spoilt(self, parameter: torch.nn.Parameter) -> bool:
        noted = self._spoilt.get(id(parameter))
        if noted is None:
            return False
        if noted() is parameter and parameter.grad is not None and not is_finite(parameter.grad):
            return True
        del self._spoilt[id(parameter)]
        return False

    def error(
        self, place: str, accused: Accused, parameters: Mapping[int, torch.nn.Parameter]
    ) -> FailedPreconditionError:
        """Return the error that names the replicas and parameters with nonfinite gradients.

        Args:
            place: Description of the backward pass.
            accused: Faults of each replica's own gradients.
            parameters: All parameters, by number.
        """
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
    """Skips steps of optimizers.

    Args:
        is_due: Returns True if the step of an optimizer must be skipped. Called when a step begins, and after each run
            of a closure.

    Attributes:
        count: Number of skipped steps.
    """

    def __init__(self, is_due: Callable[[torch.optim.Optimizer], bool]) -> None:
        self.count = 0
        self._is_due = is_due
        self._counted = False
        self._hidden: dict[torch.Tensor, torch.Tensor] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Apply to the optimizer steps of this thread inside the block, those in hooks of backward passes included."""
        with _HOOKS.lead_to(self):
            try:
                yield
            finally:
                self._show()  # after a step that raised

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Hide gradients if the step must be skipped. Return replacement arguments for a step with a closure."""
        self._show()
        self._counted = False
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            # The closure computes the gradients, so the decision follows each call of it.
            seen = self._seen_after(closure, optimizer)
            return ((args[0], seen, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": seen})
        self._hide_if_due(optimizer)
        return None

    def after_step(self) -> None:
        """Restore hidden gradients."""
        self._show()

    def _seen_after(self, closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        def run() -> Any:
            self._show()
            loss = closure()
            self._hide_if_due(optimizer)
            return loss

        return run

    def _hide_if_due(self, optimizer: Any) -> None:
        if not self._is_due(optimizer):
            return
        self.count += not self._counted
        self._counted = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden[parameter], parameter.grad = parameter.grad, None

    def _show(self) -> None:
        for parameter, gradient in self._hidden.items():
            parameter.grad = gradient
        self._hidden.clear()


_MINE: ContextVar[SkippedUpdates | None] = ContextVar("raydist_skipped_updates", default=None)


@final
class _Hooks:
    """Global hooks of torch around the steps of all optimizers of the process.

    The first `lead_to` registers the hooks, and nothing removes them: torch iterates over its hooks during a step, and
    a change by another thread would raise an error there. Outside of `lead_to` the hooks take 0.2 us a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watching: tuple[SkippedUpdates, ...] = ()
        self._installed = False

    @contextlib.contextmanager
    def lead_to(self, skipped: SkippedUpdates) -> Iterator[None]:
        with self._lock:
            if not self._installed:
                register_optimizer_step_pre_hook(self._before)
                register_optimizer_step_post_hook(self._after)
                self._installed = True
            self._watching = (*self._watching, skipped)
        token = _MINE.set(skipped)
        try:
            yield
        finally:
            _MINE.reset(token)
            with self._lock:
                self._watching = tuple(other for other in self._watching if other is not skipped)

    def _current(self) -> SkippedUpdates | None:
        mine = _MINE.get()
        if mine is None and len(self._watching) == 1 and _is_foreign_thread():
            # A thread of the autograd engine, which runs hooks on parameters of a GPU.
            return self._watching[0]
        return mine

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        skipped = self._current()
        return None if skipped is None else skipped.before_step(optimizer, args, kwargs)

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        skipped = self._current()
        if skipped is not None:
            skipped.after_step()


def _is_foreign_thread() -> bool:
    """Return True in a thread that Python did not start."""
    return isinstance(threading.current_thread(), threading._DummyThread)


# One per process, as torch's hooks are.
_HOOKS = _Hooks()
