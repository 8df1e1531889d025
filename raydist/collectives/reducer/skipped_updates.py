"""Optimizer steps that change nothing, whatever the optimizer is.

Every optimizer of torch passes over parameters whose `.grad` is None: no update, no moment, no count of steps. So
gradients are out of sight while a step that must change nothing runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["SkippedUpdates"]

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@final
class SkippedUpdates:
    """Which steps of optimizers change nothing.

    Args:
        is_due: Whether the step of an optimizer must change nothing, asked when it begins, and each time that its
            closure has run.

    Attributes:
        count: Steps that changed nothing.
    """

    def __init__(self, is_due: Callable[[torch.optim.Optimizer], bool]) -> None:
        self.count = 0
        self._is_due = is_due
        self._counted = False
        self._hidden: dict[torch.Tensor, torch.Tensor] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Look after the steps that this thread calls inside the block, and the backward passes that it runs there."""
        with _HOOKS.lead_to(self):
            try:
                yield
            finally:
                self._show()  # after a step that raised

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """An optimizer is about to step; with which arguments instead, if not with these."""
        self._show()
        self._counted = False
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            # Gradients are what it leaves behind.
            seen = self._seen_after(closure, optimizer)
            return ((args[0], seen, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": seen})
        self._hide_if_due(optimizer)
        return None

    def after_step(self) -> None:
        """It has stepped."""
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
    """What torch calls around the steps of all optimizers of the process.

    Put in place for the first that watches, and never taken away: torch goes through its hooks while it steps, and a
    thread that changed them meanwhile would be an error in another one. With nobody watching they take 0.2 us a step.
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
        if mine is None and len(self._watching) == 1 and torch._C._current_graph_task_id() != -1:
            # A thread of the autograd engine, where hooks on parameters of a GPU run.
            return self._watching[0]
        return mine

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        skipped = self._current()
        return None if skipped is None else skipped.before_step(optimizer, args, kwargs)

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        skipped = self._current()
        if skipped is not None:
            skipped.after_step()


# One per process, as torch's hooks are.
_HOOKS = _Hooks()
