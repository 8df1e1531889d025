"""Optimizers by name, checks of optimizers and schedulers, and the update of parameters after a backward pass."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from raydist.core.errors import InvalidArgumentError


@final
class Accumulation(nn.Module):
    """The state of a group of batches that make one step. Its mirrored buffers outlive a call to the replicas.

    Args:
        size: Batches of a group.
        scaled: Keep the factors of gradients near 1, as float16 needs it: weights are relative to the group's first
            batch.

    >>> group = Accumulation(2)
    >>> group.add(8)
    tensor(8., dtype=torch.float64)
    >>> group.is_empty, group.is_full
    (False, False)
    """

    batches: torch.Tensor
    weight: torch.Tensor
    unit: torch.Tensor | None

    def __init__(self, size: int, *, scaled: bool = False) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("weight", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unit", torch.ones((), dtype=torch.float64) if scaled else None)

    @property
    def is_empty(self) -> bool:
        """True if no batch of the group was added yet."""
        return not self.batches

    @property
    def is_full(self) -> bool:
        """True if the group is complete."""
        return int(self.batches) >= self.size

    def add(self, weight: Any) -> torch.Tensor:
        """Count another global batch. Return the factor by which its gradients must be multiplied."""
        if self.unit is not None and self.is_empty:
            self.unit.copy_(weight if weight > 0 else torch.ones(()))
        factor = torch.as_tensor(weight, dtype=torch.float64) / (1.0 if self.unit is None else self.unit)
        self.batches += 1
        self.weight += factor
        return factor

    def take_mean(self, parameters: list[torch.Tensor]) -> None:
        """Divide the gradients to become the mean over the group, and begin the next group."""
        _divide_gradients(parameters, self.weight)
        self.batches.zero_()
        self.weight.zero_()


@final
@dataclass(frozen=True, slots=True)
class Update:
    """The change of parameters by a step.

    Attributes:
        optimizers: The optimizers, one or several.
        scheduler: Steps after each step of the optimizers.
        clip_norm: Limit of the norm of all gradients together.
        accumulation: Group of batches that make one step, as if they were one batch.
        scaler: Scales the loss for gradients in float16.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    scheduler: LRScheduler | None = None
    clip_norm: float | None = None
    accumulation: Accumulation | None = None
    scaler: torch.amp.GradScaler | None = None

    def begin(self) -> None:
        """Prepare the gradients before the forward pass of a batch."""
        if self.accumulation is None or self.accumulation.is_empty:
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def backward(self, objective: torch.Tensor, denominator: Any) -> None:
        """Add the gradients of a batch, which are global afterwards.

        The gradients of `objective`, summed over the replicas, are those of the global batch's loss, which has this
        denominator (rows, for example; None for a sum).
        """
        if self.accumulation is not None:
            factor = self.accumulation.add(0 if denominator is None else denominator)
            objective = objective if denominator is None else objective * factor.to(objective)
        (objective if self.scaler is None else self.scaler.scale(objective)).backward()

    def divide(self, denominator: Any) -> None:
        """Divide gradients of a batch, which are global, by the denominator of its loss: of sums they become means.

        Gradients of several batches that make one step are divided together, when the last one is there.
        """
        if self.accumulation is not None:
            self.accumulation.add(0 if denominator is None else denominator)
        elif denominator is not None:
            _divide_gradients(self._parameters(), denominator)

    def end(self) -> None:
        """Change the parameters after the backward pass of a batch, unless the group is incomplete."""
        if self.accumulation is None or self.accumulation.is_full:
            self._apply()

    def finish(self) -> None:
        """Change the parameters by an incomplete group after the last batch."""
        if self.accumulation is not None and not self.accumulation.is_empty:
            self._apply()

    def _apply(self) -> None:
        parameters = self._parameters()
        if self.accumulation is not None:
            self.accumulation.take_mean(parameters)
        if self.clip_norm is not None:
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self._step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _step(self) -> None:
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def _parameters(self) -> list[torch.Tensor]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]


def _divide_gradients(parameters: list[torch.Tensor], denominator: Any) -> None:
    total = float(denominator)
    for parameter in parameters:
        if parameter.grad is not None and total:
            parameter.grad.div_(total)


def scheduler_of(
    given: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """Return the scheduler passed to `compile`, or the one that the function passed to `compile` creates."""
    if given is None:
        return None
    made: Any = given if isinstance(given, LRScheduler) or not callable(given) else given(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise InvalidArgumentError(
            "scheduler must be one that steps with the optimizer, got ReduceLROnPlateau, which waits for a metric. "
            "Call its step(logs[...]) in the on_epoch_end of a callback."
        )
    if not isinstance(made, LRScheduler):
        raise InvalidArgumentError(
            f"scheduler must be a torch.optim.lr_scheduler.LRScheduler, or a function that makes one of the optimizer, "
            f"got {made!r}."
        )
    if made.optimizer is not optimizer:
        raise InvalidArgumentError(
            f"The scheduler must be of the optimizer that is compiled with it, got one of another "
            f"{type(made.optimizer).__name__}. Give compile a function: scheduler=lambda it: StepLR(it, 10)."
        )
    return made


_Class = TypeVar("_Class", bound=type)


def class_by_name(name: str, classes: Mapping[str, _Class], what: str, suffix: str = "") -> _Class:
    """Return the class of a name, in any case and with or without underscores and `suffix`."""
    plain = {_plain(known): found for known, found in classes.items()}
    for wanted in (_plain(name), _plain(name + suffix)):
        if wanted in plain:
            return plain[wanted]
    near = difflib.get_close_matches(_plain(name + suffix), plain, n=1)
    hint = f" Did you mean {plain[near[0]].__name__!r}?" if near else ""
    raise InvalidArgumentError(
        f"{what} must be one of torch's classes by its name, or made by you, got {name!r}.{hint} There are: "
        f"{', '.join(sorted(classes))}."
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def optimizer_by_name(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Return the torch optimizer of a name ("adam", "SGD"), over all parameters of `module`, with its defaults."""
    found = {kind.__name__: kind for kind in vars(torch.optim).values() if _is_optimizer(kind)}
    kind: Any = class_by_name(name, found, "optimizer")
    _require_steps_alone(kind)
    named = dict(module.named_parameters())
    if not named:
        raise InvalidArgumentError(f"{name!r} needs parameters to optimise, got a {type(module).__name__} without any.")
    _require_suited(kind, module, named)
    optimizer: torch.optim.Optimizer = kind(list(named.values()))
    return optimizer


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


def _require_steps_alone(kind: type) -> None:
    if issubclass(kind, torch.optim.LBFGS):
        raise InvalidArgumentError(
            "fit needs an optimizer that steps once for each batch, got LBFGS, which asks for the loss several times a "
            'step. Use another one ("adamw"), or a loop of your own with optimizer.step(closure) in strategy.run.'
        )


def _require_suited(kind: type, module: nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    """Raise InvalidArgumentError for parameters that a torch optimizer does not support."""
    if kind is torch.optim.Muon:
        others = [f"{name} {tuple(each.shape)}" for name, each in named.items() if each.ndim != 2]
        what = "matrices, parameters of two dimensions,"
    elif kind is torch.optim.SparseAdam:
        tables = (part for part in module.modules() if getattr(part, "sparse", False))
        sparse = {id(parameter) for part in tables for parameter in part.parameters(recurse=False)}
        others = [f"{name} {tuple(each.shape)}" for name, each in named.items() if id(each) not in sparse]
        what = "parameters with sparse gradients, as of Embedding(sparse=True),"
    else:
        return
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise InvalidArgumentError(
            f"torch.optim.{kind.__name__} takes {what} only, got {len(others)} others of {len(named)}: {shown}. Use "
            f'"adamw" for all, or freeze the others and give torch.optim.{kind.__name__}([the rest]) to compile.'
        )


def require_optimizer(optimizer: Any, module: nn.Module, loss: Any) -> None:
    """Raise InvalidArgumentError unless `optimizer` is a torch optimizer over parameters of `module` and `loss`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}. "
            "Example: torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    _require_steps_alone(type(optimizer))
    known = {id(parameter) for part in (module, loss) if isinstance(part, nn.Module) for parameter in part.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [tuple(parameter.shape) for parameter in given if id(parameter) not in known]
    if foreign:
        raise InvalidArgumentError(
            f"The optimizer must hold parameters of the model: {len(foreign)} of its {len(given)} are not among them, "
            f"the first has the shape {foreign[0]}. Make it from model.parameters(), once the module is complete."
        )
