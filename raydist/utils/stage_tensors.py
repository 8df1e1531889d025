"""Tensors of a pipeline: each parameter has values in one stage, and a placeholder without memory in the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from raydist.compat.torch_internals import plain_tensors
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError

_STAGE = "_raydist_stage"
_READERS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__"}
_SAME_PLACE = {"cpu", "cuda"}


@final
class Placeholder(torch.Tensor):
    """A tensor that another stage computes or holds: its shape, type and device here, without values or memory.

    Whatever is computed with a placeholder is one, too, so no number can depend on missing values unnoticed.

    Attributes:
        home: The device that the values would have here.
        received: The values, once the other stage has sent them; else None.

    >>> Placeholder.like(torch.ones(2, 3)).sum(1)
    Placeholder(shape=(2,), dtype=torch.float32)
    """

    home: torch.device
    received: torch.Tensor | None = None

    @staticmethod
    def like(tensor: torch.Tensor) -> Placeholder:
        """Return a placeholder with the shape, type, device and `requires_grad` of a tensor."""
        with plain_tensors():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        return _as_placeholder(empty, tensor.home if isinstance(tensor, Placeholder) else tensor.device)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "")
        home = next(each.home for each in _tensors_in((args, given)) if isinstance(each, Placeholder))
        if (getter := _OF_HOME.get(func)) is not None:
            return getter(home)
        if name in _READERS:
            raise FailedPreconditionError(
                f"{name} needs the values of a tensor of shape {tuple(args[0].shape)} that another stage of the "
                "pipeline holds or computes. Read parameters between steps, and use other values in the part of the "
                "module that computes them."
            )
        if name in _SAME_PLACE:
            return args[0]
        if (target := written_by(func, args, given)) is not None and not isinstance(target, Placeholder):
            raise InvalidArgumentError(
                f"{name} would write values of one stage of the pipeline into a tensor that all stages have. Make a "
                "new tensor instead, as torch.where and torch.cat do."
            )
        with plain_tensors():
            args, given = map_leaves(_on_meta, args), map_leaves(_on_meta, given)
            if name == "to" and isinstance(args[1] if len(args) > 1 else None, str):
                args = (args[0], torch.device("meta"), *args[2:])
            result = func(*args, **given)
        return map_leaves(lambda each: _as_placeholder(each, home) if isinstance(each, torch.Tensor) else each, result)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype})"


def written_by(func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor that a function of torch writes to in place; None if there is none."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    target = args[0] if in_place and args else given.get("out")
    return target if isinstance(target, torch.Tensor) else None


_PROPERTIES: Any = torch.Tensor  # torch's stubs take its properties for their values
_OF_HOME: dict[Any, Callable[[torch.device], Any]] = {
    _PROPERTIES.device.__get__: lambda home: home,
    _PROPERTIES.is_meta.__get__: lambda home: False,
    _PROPERTIES.is_cuda.__get__: lambda home: home.type == "cuda",
}


def _as_placeholder(tensor: torch.Tensor, home: torch.device) -> Placeholder:
    made = tensor if isinstance(tensor, Placeholder) else tensor.as_subclass(Placeholder)
    made.home = home
    return made


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, torch.Tensor) and not isinstance(value, Placeholder) else value


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Change the leaves of the arguments, or of the results, of a function of torch.

    >>> map_leaves(lambda leaf: leaf + 1, (1, [2], {"three": 3}))
    (2, [3], {'three': 4})
    """
    if isinstance(value, dict):
        return {key: map_leaves(change, each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_leaves(change, each) for each in value)
    if isinstance(value, tuple) and hasattr(value, "n_fields"):  # torch.return_types
        return type(value)(map_leaves(change, tuple(value)))
    return change(value)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_leaves(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, value)
    return found


@final
@dataclass(frozen=True)
class Holder:
    """The stage that holds the values of a tensor.

    Attributes:
        stage: Number of the stage.
        is_here: True on the ranks of this stage.
        group: Process group of the stages of one pipeline.
    """

    stage: int
    is_here: bool
    group: Any

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values. A collective of the stages."""
        values = tensor.detach().contiguous() if self.is_here else _empty_like(tensor)
        if values.numel():
            dist.broadcast(values.reshape(-1).view(torch.uint8), group=self.group, group_src=self.stage)
        return values


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    with plain_tensors():
        home = tensor.home if isinstance(tensor, Placeholder) else tensor.device
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=home)


def holder_of(tensor: Any) -> Holder | None:
    """Return the stage that holds the values of a tensor; None for tensors that are of no stage.

    >>> holder_of(torch.ones(1))
    """
    found: Holder | None = getattr(tensor, _STAGE, None)
    return found


def held_by(tensor: torch.Tensor, holder: Holder | None) -> torch.Tensor:
    """Note that a stage holds the values of a tensor; return the tensor."""
    setattr(tensor, _STAGE, holder)
    return tensor


def states_of_all(
    parameters: Iterable[torch.Tensor], states: Mapping[Any, Mapping[str, Any]]
) -> dict[Any, Mapping[str, Any]]:
    """Return what stages hold for each parameter, by parameter, in the same order in all stages. A collective of these.

    Args:
        parameters: All parameters of an optimizer, the same ones in all stages.
        states: Values by name, for the parameters of this stage (others are ignored).

    Returns:
        States in which `Holder.whole` of each tensor returns its values.
    """
    listed = list(parameters)
    holders = [holder_of(parameter) for parameter in listed]
    group = next((holder.group for holder in holders if holder is not None), None)
    if group is None:
        return dict(states)
    mine = {
        number: {name: _described(value) for name, value in states[listed[number]].items()}
        for number, holder in enumerate(holders)
        if holder is not None and holder.is_here and listed[number] in states
    }
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    everyones = {number: described for each in told for number, described in each.items()}
    found: dict[Any, Mapping[str, Any]] = {}
    for number in sorted(everyones):
        parameter, holder = listed[number], holders[number]
        held = states[parameter] if number in mine else {}
        found[parameter] = {
            name: held_by(held[name].detach() if name in held else _made_of(value, parameter.device), holder)
            if isinstance(value, _Described)
            else value
            for name, value in everyones[number].items()
        }
    return found


@final
@dataclass(frozen=True)
class _Described:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _described(value: Any) -> Any:
    return _Described(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _made_of(value: _Described, home: torch.device) -> Placeholder:
    return _as_placeholder(torch.empty(value.shape, dtype=value.dtype, device="meta"), home)
