"""How to build a module of torch.nn's again, from names and JSON values alone: containers of modules of torch.nn.

A recipe names classes of `torch.nn` and nothing else, so that reading one imports nothing and runs no code but torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from raydist.errors import InvalidArgumentError

__all__ = ["build_module", "recipe_of"]

_CONTAINERS: dict[str, type[nn.Module]] = {
    "Sequential": nn.Sequential,
    "ModuleList": nn.ModuleList,
    "ModuleDict": nn.ModuleDict,
}
_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
_NO_LEAVES = ("container", "transformer", "module", "loss", "lazy")  # files of torch.nn without single layers
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NEVER_SAID = ("device", "min_value", "max_value")  # the last two are other names of old
_DEEPEST = 50


def recipe_of(module: nn.Module) -> dict[str, Any] | None:
    """How to build `module` again but for its state; None if torch.nn's names and JSON values do not tell.

    >>> recipe_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False)))["parts"][1]
    ['1', {'class': 'Linear', 'args': {'in_features': 4, 'out_features': 2, 'bias': False, 'dtype': 'float32'}}]
    """
    try:
        return None if _has_shared_parts(module) else _recipe(module)
    except _UntoldError:
        return None


class _UntoldError(Exception):
    """A module is more than a recipe can say."""


def _has_shared_parts(module: nn.Module) -> bool:
    everything = [id(part) for part in _parts(module)]
    tensors = [id(p) for part in module.modules() for p in part._parameters.values() if p is not None]
    return len(set(everything)) < len(everything) or len(set(tensors)) < len(tensors)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Every place in the tree, one that holds a module of another place included."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _parts(child)


def _recipe(module: nn.Module) -> dict[str, Any]:
    kind = module.__class__
    held = vars(module)
    if "forward" in held or any(held.get(hooks) for hooks in _HOOKS):
        raise _UntoldError
    if _CONTAINERS.get(kind.__name__) is kind:
        parts = [[name, _recipe(child)] for name, child in module._modules.items() if child is not None]
        return {"class": kind.__name__, "parts": parts}
    if _leaf_class(kind.__name__) is not kind or module._modules:
        raise _UntoldError
    return {"class": kind.__name__, "args": {name: _argument(module, name) for name in _parameters(kind)}}


def _leaf_class(name: Any) -> type[nn.Module] | None:
    """The class of single layers that torch.nn has by this name."""
    kind = getattr(nn, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        return None
    package, _, file = kind.__module__.rpartition(".")
    return kind if package == "torch.nn.modules" and file not in _NO_LEAVES else None


def _parameters(kind: type[nn.Module]) -> list[str]:
    """What its constructor takes, as far as a recipe says it."""
    if issubclass(kind, nn.RNNBase):
        more = {"LSTM": ("proj_size",), "RNN": ("nonlinearity",)}.get(kind.__name__, ())
        return [*_RECURRENT, *more, "dtype"]
    if kind is nn.Identity or kind.__init__ is nn.Module.__init__:
        return []
    parameters = inspect.signature(kind).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise _UntoldError
    return [p.name for p in parameters if p.name not in _NEVER_SAID and not p.name.startswith("_")]


def _argument(module: nn.Module, name: str) -> Any:
    """What the constructor must have been given for `name`: an attribute of the same name, as JSON."""
    if name == "dtype":
        tensors = (*module._parameters.values(), *module._buffers.values())
        dtypes = {tensor.dtype for tensor in tensors if tensor is not None and tensor.is_floating_point()}
        if len(dtypes) > 1:
            raise _UntoldError
        return str(dtypes.pop()).removeprefix("torch.") if dtypes else None
    if not hasattr(module, name):
        raise _UntoldError
    value = getattr(module, name)
    if name == "bias":
        return value is not None and value is not False
    return _json(value)


def _json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_json(item) for item in value]
    raise _UntoldError


def build_module(recipe: Any, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """The module of a recipe, with a state as new. Takes no more memory than `tensors`, whose names and shapes it has.

    Raises:
        InvalidArgumentError: This is no recipe that `recipe_of` gives for such a state.
    """
    try:
        with torch.device("meta"):
            outline = _build(recipe, len(tensors), 0)
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in _state(outline).items()}
        if shapes == {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}:
            return _build(recipe, len(tensors), 0)
        reason = "it has other parameters than the file"
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError, AssertionError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise InvalidArgumentError(
        f"The file must say how its module is made of torch.nn's, what it says can't be built ({reason:.200}). Pass "
        "the module: Model.load(path, module=...)."
    )


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def _build(recipe: Any, num_tensors: int, depth: int) -> nn.Module:
    if not isinstance(recipe, dict) or depth > _DEEPEST:
        raise ValueError(f"{recipe!r:.60} is no recipe")
    container = _CONTAINERS.get(recipe["class"])
    if container is not None:
        module = container()
        for name, part in recipe["parts"]:
            module.add_module(name, _build(part, num_tensors, depth + 1))
        return module
    kind = _leaf_class(recipe["class"])
    if kind is None:
        raise ValueError(f"{recipe['class']!r:.60} is no layer of torch.nn")
    return kind(**_arguments(kind, recipe["args"], num_tensors))


def _arguments(kind: type[nn.Module], args: dict[str, Any], num_tensors: int) -> dict[str, Any]:
    unknown = sorted(set(args) - set(_known_parameters(kind)))
    if unknown:
        raise ValueError(f"{kind.__name__} takes no {unknown[0]!r:.60}")
    if issubclass(kind, nn.RNNBase) and not 0 < args["num_layers"] <= num_tensors:
        raise ValueError(f"{args['num_layers']!r:.20} layers have more than {num_tensors} parameters")
    given = {name: _tuples(value) for name, value in args.items() if name != "dtype"}
    dtype = getattr(torch, str(args.get("dtype")), None)
    return given | {"dtype": dtype} if isinstance(dtype, torch.dtype) else given


def _known_parameters(kind: type[nn.Module]) -> list[str]:
    try:
        return _parameters(kind)
    except _UntoldError:
        raise ValueError(f"{kind.__name__} is not built from names") from None


def _tuples(value: Any) -> Any:
    """JSON has lists where constructors take tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
