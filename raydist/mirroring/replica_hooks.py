"""Hooks of a replica on mirrored objects: refuse moves and new parameters in a step, and note optimizer steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch.nn.modules import module as torch_module

from raydist.compat.torch_internals import disable_compiler, is_wrapped_step, mark_as_stepped, mark_as_wrapped_step
from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.handles import ReplicaTable
from raydist.utils.sharded_tensors import SHARDED


@final
class ParameterGuard:
    """Refuses, during a step, new parameters in mirrored modules, and moves of mirrored modules.

    A parameter that a step creates in a mirrored module would exist once per replica, unsynchronised, and the driver
    would not find a parameter that a step moved away. Modules that a step makes for itself are not checked. torch keeps
    the hooks between steps, where they do nothing: registering them in each step took eight calls.

    Attributes:
        is_on: True while a step runs.
    """

    def __init__(self, is_mirrored: Callable[[Any], bool]) -> None:
        self.is_on = False
        self._is_mirrored = is_mirrored
        self._is_hooked = False

    def hook(self) -> None:
        """Make torch call the guard from now on. Idempotent."""
        if not self._is_hooked:
            self._is_hooked = True
            _guards.add(weakref.ref(self, _guards.discard))
            _hook_into_torch()

    def check(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Raise if this value must not be registered in the module under this name."""
        if not self.is_on or value is None or not self._is_mirrored(module) or SHARDED in vars(module):
            return  # a sharded module registers parameters whenever it gathers them
        parameters = [value] if isinstance(value, torch.Tensor) else value.parameters()
        if not all(self._is_mirrored(parameter) for parameter in parameters):
            raise FailedPreconditionError(
                f"The parameters of a mirrored module must be created under the scope, on the driver; a step "
                f"registered {name!r} in {type(module).__name__}. Create it inside `with strategy.scope():`, outside "
                f"of the step."
            )

    def check_move(self, module: torch.nn.Module, move: Callable[[torch.nn.Module], object]) -> None:
        """Raise if `move` would take this module, or a module in it, to another device."""
        for part in module.modules() if self.is_on else ():
            here = next((tensor.device for tensor in (*part.parameters(), *part.buffers())), None)
            if here is None or not self._is_mirrored(part):
                continue
            probe = torch.nn.Module()
            probe.register_buffer("tensor", torch.empty(0, device=here))
            move(probe)
            there = probe.get_buffer("tensor").device
            if there != here:
                raise FailedPreconditionError(
                    f"Variables must be where their strategy has them ({here}); a step moves a "
                    f"{type(part).__name__} to {there}. Leave out .to(device): each replica has the model, and gets "
                    "its batches, on its own device."
                )


_guards: set[weakref.ref[ParameterGuard]] = set()


def _living_guards() -> list[ParameterGuard]:
    return [guard for known in _guards.copy() if (guard := known()) is not None]


@functools.cache
def _hook_into_torch() -> None:
    """Make torch call all guards before a module registers a parameter or a submodule, or is moved or cast.

    The hooks are never removed: torch iterates over them, maybe while another thread builds a module.
    """

    def check(module: torch.nn.Module, name: str, value: Any) -> None:
        for guard in _living_guards():
            guard.check(module, name, value)

    torch_module.register_module_parameter_registration_hook(check)
    torch_module.register_module_module_registration_hook(check)
    for move in ("to", "cpu", "cuda", "to_empty"):  # torch has no hook for moves
        setattr(torch.nn.Module, move, _asking(getattr(torch.nn.Module, move)))


def _asking(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def ask_and_move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for guard in _living_guards():
            guard.check_move(module, lambda other: plain(other, *args, **kwargs))
        return plain(module, *args, **kwargs)

    return ask_and_move


def note_steps(
    optimizer: torch.optim.Optimizer,
    on_step: Callable[[], None],
    carry_out: Callable[..., Any] | None = None,
    on_cleared: Callable[[torch.optim.Optimizer], None] = lambda _: None,
) -> None:
    """Make an optimizer report its steps, and mark itself as stepped, as a scheduler's constructor arranges.

    A scheduler warns if it steps before its optimizer. The constructor of the scheduler ran on the driver, but the
    optimizer steps here; the driver gets the mark with the control state.

    `on_step` is called before each step, `on_cleared` with the optimizer after each `zero_grad`, and `carry_out` (if
    not None) with (optimizer, step, *args, **kwargs) in place of `step`.
    """
    if is_wrapped_step(optimizer.step):
        return
    reference = weakref.ref(optimizer)
    original = type(optimizer).step

    @disable_compiler  # in a compiled step torch would trace the bookkeeping and the exchange, in many pieces
    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        if owner is None:
            raise ReferenceError(
                f"An optimizer must live while its step method is called, this {original.__qualname__} has lost its "
                f"own. Keep the optimizer, not its method."
            )
        mark_as_stepped(owner)
        on_step()
        if carry_out is None:
            return original(owner, *args, **kwargs)
        return carry_out(owner, functools.partial(original, owner), *args, **kwargs)

    mark_as_wrapped_step(step)
    optimizer.step = step  # type: ignore[method-assign]
    if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(optimizer):
        optimizer.zero_grad = _clearing(reference, on_cleared)  # type: ignore[method-assign]


def _clearing(
    reference: weakref.ref[torch.optim.Optimizer], on_cleared: Callable[[torch.optim.Optimizer], None]
) -> Callable[..., None]:
    @disable_compiler  # as torch has it
    @functools.wraps(torch.optim.Optimizer.zero_grad)
    def zero_grad(set_to_none: bool = True) -> None:
        owner = reference()
        if owner is not None:  # else nobody can use the gradients
            torch.optim.Optimizer.zero_grad(owner, set_to_none)
            on_cleared(owner)

    zero_grad.stays_here = True  # type: ignore[attr-defined]  # not pickled with the optimizer
    return zero_grad


@final
class OptimizerLog:
    """Steps and learning rates of the mirrored optimizers of one replica, which ranks compare in the trailer.

    Attributes:
        count: Number of steps since the last restart.
    """

    def __init__(self, table: ReplicaTable) -> None:
        self.count = 0
        self._table = table
        self._looked_at = -1
        self._optimizers: list[torch.optim.Optimizer] = []

    def note(self) -> None:
        """Count a step of an optimizer."""
        self.count += 1

    def restart(self) -> None:
        """Count from 0 again, because all replicas hold the same values now."""
        self.count = 0

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return all mirrored optimizers, in an order that is the same on every replica."""
        if self._looked_at != self._table.changes:
            self._looked_at = self._table.changes
            self._optimizers = [obj for _, obj in self._table.items() if isinstance(obj, torch.optim.Optimizer)]
        return self._optimizers

    def rates(self) -> tuple[float, ...]:
        """Return the learning rates of all groups of all optimizers, except of rates that are CUDA tensors."""
        rates = [group.get("lr") for optimizer in self.optimizers() for group in optimizer.param_groups]
        # Reading a number from a GPU would wait for all work of the GPU.
        return tuple(float(rate) for rate in rates if rate is not None and not getattr(rate, "is_cuda", False))
