"""What a replica hooks into torch, for what only holds in its process: the driver made the objects, steps use them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch.nn.modules import module as torch_module

from raydist.errors import FailedPreconditionError
from raydist.optimizer_hooks import clear_gradients, is_unobserved, unobserved_step

__all__ = ["ParameterGuard", "note_steps"]


@final
class ParameterGuard:
    """While it is on, mirrored modules take no parameters and no submodules with parameters but mirrored ones, and
    stay where they are.

    A parameter that a step creates in a mirrored module would exist once per replica, unsynchronised; one that it moves
    away, the driver would not find. Modules that a step makes for itself are its own affair. The guard is on during
    every step, so torch has its hooks all the time, and they do nothing else: putting them in place anew took eight
    calls.

    Args:
        is_mirrored: Whether the driver made an object.

    Attributes:
        is_on: Whether a step runs.
    """

    def __init__(self, is_mirrored: Callable[[Any], bool]) -> None:
        self.is_on = False
        self._is_mirrored = is_mirrored
        self._is_hooked = False

    def hook(self) -> None:
        """Let torch ask it from now on. May be called again."""
        if not self._is_hooked:
            self._is_hooked = True
            _guards.add(weakref.ref(self, _guards.discard))
            _hook_into_torch()

    def check(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Raise where this value must not be registered in the module under this name."""
        if not self.is_on or value is None or not self._is_mirrored(module):
            return
        parameters = [value] if isinstance(value, torch.Tensor) else value.parameters()
        if not all(self._is_mirrored(parameter) for parameter in parameters):
            raise FailedPreconditionError(
                f"The parameters of a mirrored module must be created under the scope, on the driver; a step "
                f"registered {name!r} in {type(module).__name__}. Create it inside `with strategy.scope():`, outside "
                f"of the step."
            )

    def check_move(self, module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise where this module must not have its tensors exchanged for what `change` makes of them."""
        if not self.is_on or not self._is_mirrored(module):
            return
        own = [*module._parameters.values(), *module._buffers.values()]
        here = next((tensor.device for tensor in own if tensor is not None), None)
        there = here if here is None else change(torch.empty(0, device=here)).device
        if there != here:
            raise FailedPreconditionError(
                f"Variables must be where their strategy has them ({here}); a step moves a {type(module).__name__} to "
                f"{there}. Leave out .to(device): each replica has the model, and gets its batches, on its own device."
            )


_guards: set[weakref.ref[ParameterGuard]] = set()


def _living_guards() -> list[ParameterGuard]:
    return [guard for known in tuple(_guards) if (guard := known()) is not None]


@functools.cache
def _hook_into_torch() -> None:
    """Have all guards asked before a module takes a parameter or a submodule, or is moved or cast.

    For good: torch iterates over its hooks, which must not change while another thread builds a module.
    """

    def check(module: torch.nn.Module, name: str, value: Any) -> None:
        for guard in _living_guards():
            guard.check(module, name, value)

    torch_module.register_module_parameter_registration_hook(check)
    torch_module.register_module_module_registration_hook(check)
    plain: Any = torch.nn.Module._apply  # torch has no hook for moves

    @functools.wraps(plain)
    def ask_and_apply(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for guard in _living_guards():
            guard.check_move(module, fn)
        return plain(module, fn, recurse)

    torch.nn.Module._apply = ask_and_apply  # type: ignore[method-assign]


def note_steps(
    optimizer: torch.optim.Optimizer,
    on_step: Callable[[], None],
    carry_out: Callable[..., Any] | None = None,
    on_cleared: Callable[[torch.optim.Optimizer], None] = lambda _: None,
) -> None:
    """Let `optimizer` call `on_step` when it steps, and note it as every scheduler arranges for on construction.

    `carry_out(optimizer, step, *args, **kwargs)` then does the step, and returns what the program gets; None: `step`
    does. `on_cleared(optimizer)` is called after each `zero_grad`.

    A scheduler warns when it steps before its optimizer. Its constructor ran on the driver, the optimizer steps here;
    the note (`_opt_called`) travels back with the control state.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    reference = weakref.ref(optimizer)
    original = type(optimizer).step
    unobserved = unobserved_step(type(optimizer))

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        if owner is None:
            raise ReferenceError(
                f"An optimizer must live while its step method is called, this {original.__qualname__} has lost its "
                f"own. Keep the optimizer, not its method."
            )
        owner._opt_called = True  # type: ignore[attr-defined]
        on_step()
        does = unobserved if is_unobserved(owner) else original
        if carry_out is None:
            return does(owner, *args, **kwargs)
        return carry_out(owner, functools.partial(does, owner), *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
    if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(optimizer):
        optimizer.zero_grad = _clearing(reference, on_cleared)  # type: ignore[method-assign]


def _clearing(
    reference: weakref.ref[torch.optim.Optimizer], on_cleared: Callable[[torch.optim.Optimizer], None]
) -> Callable[..., None]:
    @functools.wraps(torch.optim.Optimizer.zero_grad)
    def zero_grad(set_to_none: bool = True) -> None:
        owner = reference()
        if owner is not None:  # else nobody could use what is cleared
            clear_gradients(owner, set_to_none)
            on_cleared(owner)

    zero_grad.stays_here = True  # type: ignore[attr-defined]  # where the optimizer is sent, it gets another
    return zero_grad
