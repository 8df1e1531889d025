"""First values of modules that were built on the device "meta", made where they are needed.

A parameter that is divided among replicas is drawn whole, one at a time, by each replica with the same seed, and each
keeps its part: the values are those of a module that was built on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from raydist.compat.torch_internals import TorchDispatchMode
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.sharding.units import find_roots
from raydist.utils.sharded_tensors import is_sharded, share_of

INITIAL_VALUES = "_raydist_initial_values"
"""Attribute of a module on "meta" whose values replicas make."""


@final
@dataclass(frozen=True, slots=True)
class InitialValues:
    """The source of first values: `init`, called with the module; None for each part's `reset_parameters()`."""

    init: Callable[[nn.Module], object] | None
    seed: int


def _keep_memory(module: nn.Module) -> None:
    """Give a module no values: they come from elsewhere."""


NO_VALUES = InitialValues(_keep_memory, 0)
"""Values of a module that gets memory only."""


@final
class SameRandomNumbers(TorchDispatchMode):
    """A context in which random in-place operations on a sharded tensor draw the whole tensor's numbers.

    torch's own draw the same numbers on every replica, each for its part.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        target: Any = args[0] if args else None
        if not is_sharded(target) or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        if not func._schema.is_mutable:
            raise InvalidArgumentError(
                f"Values of a sharded parameter must be drawn in place, as by torch.nn.init, but {func} makes another "
                "tensor. Use normal_(), uniform_() and the like."
            )
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        func(whole, *args[1:], **given)
        share: Any = share_of(whole, target)
        target.to_local().copy_(share.to_local())
        return target


def is_on_meta(module: nn.Module) -> bool:
    """Return True if a module has parameters without values."""
    return any(parameter.is_meta for parameter in module.parameters())


def materialize_module(module: nn.Module, device: torch.device, holds: Callable[[str], bool] | None = None) -> None:
    """Give a module on "meta" memory and values, in place. Its parameters become other objects.

    With `holds`, parameters whose names it refuses go back to "meta": after each part, or after an `init` function,
    which may need all of them at once.

    Raises:
        FailedPreconditionError: Nothing says which values, or a part cannot make its own.
    """
    order = _order_of(module)
    in_parts = holds is not None and (order.init is None or order is NO_VALUES)
    if not in_parts:
        module.to_empty(device=device)
    with torch.random.fork_rng(), torch.no_grad(), SameRandomNumbers():  # type: ignore[no-untyped-call]  # torch's base
        torch.manual_seed(order.seed)
        if order.init is not None:
            order.init(module)
        for name, part in module.named_modules():
            if in_parts:
                part.to_empty(device=device, recurse=False)
            if order.init is None:
                _reset(part)
            if holds is not None:
                _drop_parameters(part, name, holds)


def _order_of(module: nn.Module) -> InitialValues:
    """Return where the values of a module come from; raise if nothing says so, or a part cannot make its own."""
    order: InitialValues | None = vars(module).get(INITIAL_VALUES)
    if order is None:
        raise FailedPreconditionError(
            f'A module on the device "meta" must be given values, but {type(module).__name__} has none. Call '
            "rd.materialize(module) under the scope, before the first step."
        )
    for part in module.modules() if order.init is None else ():
        if _has_tensors(part) and not callable(getattr(part, "reset_parameters", None)):
            raise FailedPreconditionError(
                f'Each part of a module on the device "meta" must have reset_parameters(), but {type(part).__name__} '
                "has parameters or buffers, and no such method. Give rd.materialize an init function that fills them."
            )
    return order


def _reset(part: nn.Module) -> None:
    if _has_tensors(part):
        reset: Any = part.reset_parameters
        reset()


def _drop_parameters(part: nn.Module, name: str, holds: Callable[[str], bool]) -> None:
    """Free the memory of a part's parameters whose names `holds` refuses."""
    for own, parameter in [*part.named_parameters(recurse=False)]:
        if not holds(f"{name}.{own}" if name else own):
            empty = torch.empty_like(parameter, device="meta")
            setattr(part, own, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def _has_tensors(part: nn.Module) -> bool:
    return any(True for _ in (*part.parameters(recurse=False), *part.buffers(recurse=False)))


def change_modules(
    items: Sequence[tuple[int, Any]], change: Callable[[nn.Module], object]
) -> tuple[list[tuple[int, Any]], dict[int, Any]]:
    """Change the outermost new modules; return the objects with the tensors that modules have now, and those by old id.

    Optimizers among the objects train the new parameters.
    """
    moved: dict[int, Any] = {}
    for module in find_roots([obj for _, obj in items if isinstance(obj, nn.Module)]):
        before, classes = _tensors_of(module), {part: type(part).__name__ for part in module.modules()}
        change(module)
        after = _tensors_of(module)
        gone = {id(tensor): after[name] for name, tensor in before.items() if after[name] is not tensor}
        _require_no_others(classes, gone)
        moved |= gone
    for _, obj in items:
        if isinstance(obj, torch.optim.Optimizer):
            for group in obj.param_groups:
                group["params"] = [moved.get(id(parameter), parameter) for parameter in group["params"]]
    return [(handle, moved.get(id(obj), obj)) for handle, obj in items], moved


def _require_no_others(classes: Mapping[nn.Module, str], gone: Mapping[int, Any]) -> None:
    """Raise if a part refers to a parameter in a second way, which a new parameter does not change."""
    for part, kind in classes.items():
        for name, held in vars(part).items():
            values = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else (held,)
            if any(isinstance(value, nn.Parameter) and id(value) in gone for value in values):
                raise InvalidArgumentError(
                    f"Parameters of a module whose values replicas make or divide must be read as attributes, but "
                    f"{name!r} of {kind} holds them in a {type(held).__name__}. Use nn.ParameterList or "
                    "nn.ParameterDict, or make the collection in forward()."
                )


def _tensors_of(module: nn.Module) -> Mapping[str, torch.Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def materialize_new(items: Sequence[tuple[int, Any]], device: torch.device) -> Sequence[tuple[int, Any]]:
    """Give values to the new modules that are on "meta"; return the new objects, with the tensors that these have."""
    modules = [obj for _, obj in items if isinstance(obj, nn.Module)]
    if not any(map(is_on_meta, modules)):
        return items
    return change_modules(items, lambda module: materialize_module(module, device) if is_on_meta(module) else None)[0]
