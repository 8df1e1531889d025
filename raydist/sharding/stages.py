"""Stages of a pipeline: which parts of a module each one computes, and holds. Pure; starts no processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import nn

from raydist.core.errors import InvalidArgumentError

Split = tuple[str, ...] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | None
"""Names of the first parts of all stages but the first; or the layers to divide evenly, by class or by a function."""

SCHEDULES = ("1F1B", "GPipe")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # they are not called


@final
@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The division of modules into stages, and of batches into microbatches.

    Attributes:
        num_stages: Number of stages.
        num_microbatches: Smallest number of microbatches.
        schedule: Name of the order of forward and backward passes, one of `SCHEDULES`.
        split: Where stages begin; None for the children of an `nn.Sequential`, or of the longest list of layers.
    """

    num_stages: int
    num_microbatches: int
    schedule: str
    split: Split = None

    def count_microbatches(self, num_rows: int) -> int:
        """Return the number of microbatches of equal size for these rows: the smallest that is not too small.

        >>> plan = PipelinePlan(2, 4, "1F1B")
        >>> [plan.count_microbatches(rows) for rows in (8, 10, 7, 2, 0)]
        [4, 5, 7, 2, 1]
        """
        counts = range(self.num_microbatches, num_rows + 1)
        return next((count for count in counts if num_rows % count == 0), max(1, num_rows))


@final
@dataclass(frozen=True)
class StageMap:
    """The stages of the parts of one module.

    Attributes:
        starts: Stage by the name of its first part, for all stages but the first.
        parts: Stage by name, of the outermost modules that one stage calls as a whole and that have parameters or
            buffers, or begin a stage.
        tensors: Stage by name, of all parameters and buffers.
    """

    starts: Mapping[str, int]
    parts: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)


def map_stages(root: nn.Module, plan: PipelinePlan) -> StageMap:
    """Divide a module into stages, in the order in which its parts were made.

    Raises:
        InvalidArgumentError: There are more stages than layers, a name is unknown or comes too early, or two stages
            share a parameter.

    >>> layers = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.ReLU())
    >>> found = map_stages(layers, PipelinePlan(2, 1, "1F1B"))
    >>> found.parts, found.tensors
    ({'0': 0, '2': 1}, {'0.weight': 0, '0.bias': 0, '2.weight': 1, '2.bias': 1})
    """
    names = _first_parts(root, plan)
    found = StageMap({name: stage for stage, name in enumerate(names, 1)})
    opened = {""} | {".".join(name.split(".")[:count]) for name in names for count in range(name.count(".") + 1)}
    _visit(root, "", 0, opened, found)
    owners: dict[int, str] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        first = owners.setdefault(id(parameter), name)
        if found.tensors[first] != found.tensors[name]:
            raise InvalidArgumentError(
                f"A parameter must belong to one stage of a pipeline, but {first!r} and {name!r} of "
                f"{type(root).__name__} are the same one, in the stages {found.tensors[first]} and "
                f"{found.tensors[name]}. Give each its own parameter, or use ShardedStrategy."
            )
    return found


def _visit(module: nn.Module, name: str, stage: int, opened: set[str], found: StageMap) -> int:
    """Note the parts of a module; return the stage of its last part."""
    stage = found.starts.get(name, stage)
    is_open = name in opened or isinstance(module, _CONTAINERS)
    tensors = (*module.named_parameters("", not is_open, False), *module.named_buffers("", not is_open, False))
    found.tensors.update({f"{name}.{each}" if name else each: stage for each, _ in tensors})
    if is_open:
        for child_name, child in module.named_children():
            stage = _visit(child, f"{name}.{child_name}" if name else child_name, stage, opened, found)
    elif tensors or name in found.starts:
        found.parts[name] = stage
    return stage


def _first_parts(root: nn.Module, plan: PipelinePlan) -> Sequence[str]:
    """Return the names of the modules at which the stages after the first one begin."""
    kind, split, known = type(root).__name__, plan.split, dict(root.named_modules())
    if isinstance(split, tuple) and isinstance(split[0], str):
        names = [str(name) for name in split]
        unknown = [name for name in names if name not in known or not name]
        if unknown:
            raise InvalidArgumentError(
                f"split must name submodules, but {kind} has none called {unknown[0]!r}. It has {[*known][1:8]}, ..."
            )
        if sorted(names, key=[*known].index) != names:
            raise InvalidArgumentError(
                f"split must name submodules in the order in which {kind} makes them, got {names}."
            )
        return names
    layers = _layers(root, plan)
    if len(layers) < plan.num_stages:
        raise InvalidArgumentError(
            f"A pipeline must have at most as many stages as layers, got {plan.num_stages} stages for {kind} with "
            f"{len(layers)} layers ({', '.join(layers[:8]) or 'no list of modules'}). Use fewer stages, or give split "
            "the names of the submodules at which stages begin."
        )
    return [layers[math.ceil(stage * len(layers) / plan.num_stages)] for stage in range(1, plan.num_stages)]


def _layers(root: nn.Module, plan: PipelinePlan) -> list[str]:
    """Return the names of the layers that are divided evenly."""
    split = plan.split
    if isinstance(split, tuple):
        kinds = tuple(kind for kind in split if isinstance(kind, type))
        return [name for name, module in root.named_modules() if name and isinstance(module, kinds)]
    if split is not None:
        return [name for name, module in root.named_modules() if name and split(name, module)]
    lists = {name: each for name, each in root.named_modules() if isinstance(each, nn.ModuleList | nn.Sequential)}
    if not lists:
        return []
    longest = "" if "" in lists else max(lists, key=lambda name: len(lists[name]))
    prefix = f"{longest}." if longest else ""
    return [prefix + name for name, _ in lists[longest].named_children()]
