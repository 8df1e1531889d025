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
            _hook_into_torch(self)

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


_guards: weakref.WeakSet[ParameterGuard] = weakref.WeakSet()


@functools.cache
def _watch_moves() -> None:
    """Have all guards asked before a module is moved or cast, in this process for good: torch has no hook for that."""
    plain: Any = torch.nn.Module._apply

    @functools.wraps(plain)
    def ask_and_apply(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for guard in tuple(_guards):
            guard.check_move(module, fn)
        return plain(module, fn, recurse)

    torch.nn.Module._apply = ask_and_apply  # type: ignore[method-assign]


def _hook_into_torch(guard: ParameterGuard) -> None:
    """For as long as the guard lives."""
    known = weakref.ref(guard)
    _guards.add(guard)
    _watch_moves()

    def check(module: torch.nn.Module, name: str, value: Any) -> None:
        alive = known()
        if alive is not None:
            alive.check(module, name, value)

    for register in (
        torch_module.register_module_parameter_registration_hook,
        torch_module.register_module_module_registration_hook,
    ):
        weakref.finalize(guard, register(check).remove)


def note_steps(
    optimizer: torch.optim.Optimizer,
    on_step: Callable[[], None],
    carry_out: Callable[..., Any] | None = None,
) -> None:
    """Let `optimizer` call `on_step` when it steps, and note it as every scheduler arranges for on construction.

    `carry_out(optimizer, step, *args, **kwargs)` then does the step, and returns what the program gets; None: `step`
    does.

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
        optimizer.zero_grad = _clearing(reference)  # type: ignore[method-assign]


def _clearing(reference: weakref.ref[torch.optim.Optimizer]) -> Callable[..., None]:
    @functools.wraps(torch.optim.Optimizer.zero_grad)
    def zero_grad(set_to_none: bool = True) -> None:
        owner = reference()
        if owner is not None:  # else nobody could use what is cleared
            clear_gradients(owner, set_to_none)

    zero_grad.stays_here = True  # type: ignore[attr-defined]  # where the optimizer is sent, it gets another
    return zero_grad
