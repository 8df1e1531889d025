"""Units: the submodules whose parameters are gathered together, one unit at a time. Pure; starts no processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import nn

from raydist.core.errors import InvalidArgumentError
from raydist.sharding.stages import PipelinePlan

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they are not called

UnitPolicy = Literal["auto"] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]
"""The submodules that are units: repeated blocks of lists and sequences, modules of classes, or by name and module."""


DATA_AXES = ("replicate", "shard")
"""Names of the axes of a mesh along which replicas get different rows."""


@final
@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The division of modules among replicas.

    Attributes:
        axes: Name and size of each axis of the mesh of replicas, the last one varying fastest. Along "replicate" and
            "shard", which come first, replicas get different rows, along others the same.
        policy: Which submodules are units.
        param_dtype: Type in which parameters are gathered, and units compute; None for their own.
        cpu_offload: Keep parameters, gradients and optimizer states in host memory.
        parallelize: Divides a module in place, given the module and the `DeviceMesh`. None: `fully_shard`.
        pipeline: The stages, if modules are divided into stages.
    """

    axes: tuple[tuple[str, int], ...]
    policy: UnitPolicy = "auto"
    param_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    parallelize: Callable[[nn.Module, Any], object] | None = None
    pipeline: PipelinePlan | None = None

    @property
    def same_rows(self) -> int:
        """Number of consecutive replicas that get the same rows.

        >>> ShardingPlan((("shard", 2), ("tensor", 3))).same_rows
        3
        """
        return math.prod(size for name, size in self.axes if name not in DATA_AXES)


def find_roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules with parameters and a forward pass: those that a program calls.

    >>> layers = nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])
    >>> find_roots([layers, *layers])
    [Linear(in_features=1, out_features=1, bias=True)]
    """
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    outermost = [module for module in modules if id(module) not in inner]
    found: list[nn.Module] = []
    while outermost:
        module = outermost.pop(0)
        if type(module) in _CONTAINERS:
            outermost = [*module.children(), *outermost]
        elif any(True for _ in module.parameters()):
            found.append(module)
    return list(dict.fromkeys(found))


def find_units(root: nn.Module, policy: UnitPolicy) -> dict[str, nn.Module]:
    """Return the units within a module by name, inner ones before those around them. The root itself is not listed.

    >>> blocks = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> list(find_units(blocks, "auto")), list(find_units(blocks, (nn.ReLU,)))
    (['0', '2'], [])
    """
    chosen = _repeated(root) if policy == "auto" else {}
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if policy == "auto":
            is_unit = name in chosen
        elif isinstance(policy, tuple):
            is_unit = isinstance(module, policy)
        else:
            is_unit = bool(policy(name, module))
        if name and is_unit and type(module) not in _CONTAINERS and any(True for _ in module.parameters()):
            found[name] = module
    return dict(sorted(found.items(), key=lambda item: -item[0].count(".")))


def _repeated(root: nn.Module) -> Mapping[str, nn.Module]:
    """Return the children of lists and sequences whose class occurs there more than once."""
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts = Counter(type(child) for child in module.children())
            prefix = f"{name}." if name else ""
            for key, child in module.named_children():
                if counts[type(child)] > 1:
                    found[prefix + key] = child
    return found


def require_apart(roots: Sequence[nn.Module]) -> None:
    """Raise InvalidArgumentError if modules that are called by themselves share a parameter: each would train its own.

    >>> encoder = nn.Linear(2, 2)
    >>> require_apart([encoder, nn.Linear(2, 2)])
    >>> require_apart([nn.Sequential(encoder, nn.ReLU()), nn.Sequential(encoder, nn.Tanh())])
    Traceback (most recent call last):
    ...
    raydist.core.errors.InvalidArgumentError: Sharded modules that are called by themselves must not share a \
parameter, but '0.weight' of Sequential is also '0.weight' of Sequential. Make them parts of one module, and call that.
    """
    owners: dict[int, tuple[nn.Module, str]] = {}
    for root in roots:
        for name, parameter in root.named_parameters():
            owner, first = owners.setdefault(id(parameter), (root, name))
            if owner is not root:
                raise InvalidArgumentError(
                    f"Sharded modules that are called by themselves must not share a parameter, but {first!r} of "
                    f"{type(owner).__name__} is also {name!r} of {type(root).__name__}. Make them parts of one module, "
                    "and call that."
                )


def require_no_ties(root: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise InvalidArgumentError if two units share a parameter: each is gathered and freed by itself.

    >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> tied[1].weight = tied[0].weight
    >>> require_no_ties(tied, find_units(tied, "auto"))
    Traceback (most recent call last):
    ...
    raydist.core.errors.InvalidArgumentError: A parameter must belong to one unit of a sharded module, but '0.weight' \
and '1.weight' of Sequential are the same one, in the units '0' and '1'. Give a policy that makes no units of them.
    """
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        parts = name.split(".")[:-1]
        prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        owner = next((prefix for prefix in prefixes if prefix in units), "")
        first_owner, first = owners.setdefault(id(parameter), (owner, name))
        if first_owner != owner:
            told = " and ".join(repr(each) if each else "the module itself" for each in (first_owner, owner))
            raise InvalidArgumentError(
                f"A parameter must belong to one unit of a sharded module, but {first!r} and {name!r} of "
                f"{type(root).__name__} are the same one, in the units {told}. Give a policy that makes no units of "
                "them."
            )
