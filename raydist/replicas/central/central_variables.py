"""One copy of the variables in host memory: all replicas read it, and one replica applies the reduced gradient.

All replicas map a shard (`raydist.storage`) with the parameters and the optimizer state. During a step each replica has
a private (copy-on-write) view, so that none sees half of another's write. Replica 0 alone runs `optimizer.step()`, on
the shared values, while the others wait. Writes outside an optimizer must be the same on all replicas; they are
published when an optimizer steps and when the run ends. On a GPU a replica has a copy of the parameters, refreshed
after each update; the update is computed on the CPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, final

import torch

from raydist.collectives.translation import describe_odd_ones
from raydist.compat.torch_internals import disable_compiler
from raydist.errors import CollectiveMismatchError
from raydist.replicas.central.central_copy import (
    CentralCopy,
    CopiedVariables,
    Farthest,
    parameters_of,
    remembered,
    same_memories,
)
from raydist.replicas.rules import ReplicaRules, ReplicaVariables

__all__ = ["CentralVariables"]

_OWNER = 0
_LAST_BITS = 1e-5
_END = "the end of its run"
_SAME, _NEARLY, _OTHER = range(3)


@final
class CentralVariables(ReplicaRules):
    """Rules of replicas that share one copy of the variables.

    Args:
        map_parameters: Map CPU parameters from the shared copy; otherwise each replica has a private copy, as on a GPU.
    """

    def __init__(self, *, map_parameters: bool = True) -> None:
        self._copy = CentralCopy(map_parameters=map_parameters)

    def restart(self) -> None:
        self._copy.forget()

    def close(self) -> None:
        self._copy.forget()

    def after_run(self, variables: ReplicaVariables) -> None:
        if variables.num_replicas > 1:
            self._settle(variables, _END)

    @disable_compiler  # `written` reads the state of memory pages, which a compiled step cannot trace
    def step_optimizer(
        self,
        variables: ReplicaVariables,
        optimizer: torch.optim.Optimizer,
        step: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # A closure runs the model, with collectives on all replicas: so each replica steps on its private values.
        if variables.num_replicas == 1 or any(map(callable, [*args, *kwargs.values()])):
            return step(*args, **kwargs)
        doing = f"optimizer.step() of {_name_of(optimizer, variables)}"
        self._settle(variables, doing)
        result = None
        changed = False
        if variables.rank == _OWNER:
            before = list(remembered(optimizer))
            with self._copy.updating(optimizer):
                result = step(*args, **kwargs)
            changed = not same_memories(before, list(remembered(optimizer)))
        else:
            torch.autograd.graph.increment_version(parameters_of(optimizer))  # autograd must see a write here, too
        return self._share_update(variables, doing, result, changed)

    def _share_update(self, variables: ReplicaVariables, doing: str, result: Any, changed: bool) -> Any:
        """Wait for replica 0, refresh copies and placement, and return what the `step` of replica 0 returned."""
        told = variables.gather_numbers(doing, changed, result is not None)[_OWNER]
        self._copy.fetch_copies()
        if told[0]:
            self._place(variables)
        return variables.gather_objects(result)[_OWNER] if told[1] else None

    def _settle(self, variables: ReplicaVariables, doing: str) -> None:
        """Place all variables in the shared copy, and publish what replicas wrote outside an optimizer."""
        moved = not self._copy.covers(_held(variables))
        written = 0 if moved else self._copy.written()
        told = variables.gather_numbers(doing, zlib.crc32(doing.encode()), moved, written)
        _require_alike(variables, [row[0] for row in told])
        if any(row[1] for row in told):
            self._place(variables)
        elif any(row[2] for row in told):
            self._publish(variables, alike=len({row[2] for row in told}) == 1)

    def _place(self, variables: ReplicaVariables) -> None:
        held = _held(variables)
        try:
            image = self._copy.offer(held) if variables.rank == _OWNER else None
            self._require_same(variables, self._copy.take(variables.gather_objects(image)[_OWNER], held))
        finally:
            self._copy.settled()

    def _publish(self, variables: ReplicaVariables, *, alike: bool) -> None:
        """Publish the writes of replica 0; the writes of the other replicas must be the same."""
        if variables.rank == _OWNER:
            self._copy.publish()
        variables.gather_numbers("what was written by hand", 0)
        farthest = self._copy.farthest()
        self._require_same(variables, farthest, alike=alike)
        self._copy.fetch()

    def _require_same(self, variables: ReplicaVariables, farthest: Farthest, *, alike: bool = True) -> None:
        distance, tensor = farthest
        verdict = _SAME if distance == 0.0 else _NEARLY if distance <= _LAST_BITS else _OTHER
        places = [number for number, parameter in enumerate(variables.parameters()) if parameter is tensor]
        told = variables.gather_numbers("comparison of variables", verdict, (places or [-1])[0])
        if not alike or any(row[0] == _OTHER for row in told):
            raise _other_values(variables, told)


def _held(variables: ReplicaVariables) -> CopiedVariables:
    return CopiedVariables(variables.parameters(), variables.optimizers())


def _name_of(optimizer: torch.optim.Optimizer, variables: ReplicaVariables) -> str:
    numbers = [number for number, known in enumerate(variables.optimizers()) if known is optimizer]
    return f"{type(optimizer).__name__} {numbers[0] if numbers else '?'}"


def _require_alike(variables: ReplicaVariables, codes: list[int]) -> None:
    if len(set(codes)) == 1:
        return
    known = [_END, *(f"optimizer.step() of {_name_of(each, variables)}" for each in variables.optimizers())]
    names = {zlib.crc32(name.encode()): name for name in known}
    said = {rank: names.get(code, "something else") for rank, code in enumerate(codes)}
    listed = "; ".join(f"replica {rank}: {name}" for rank, name in said.items())
    raise CollectiveMismatchError(
        f"All replicas must step the same optimizers, but came to {listed}{describe_odd_ones(said)}. Look for a branch "
        "that only some replicas take."
    )


def _other_values(variables: ReplicaVariables, told: list[tuple[int, ...]]) -> CollectiveMismatchError:
    ranks = [rank for rank, row in enumerate(told) if row[0] == _OTHER]
    numbers = [row[1] for row in told if row[0] == _OTHER and row[1] >= 0]
    which = f"a parameter of shape {tuple(variables.parameters()[numbers[0]].shape)}" if numbers else "a variable"
    who = f"replica {', '.join(map(str, ranks))} wrote other values than replica 0" if ranks else "some wrote, some not"
    return CollectiveMismatchError(
        f"Replicas share one copy of the variables, so all must write the same to it by hand, but into {which} {who}. "
        "Write what is the same everywhere (ctx.all_reduce it first), or leave the writing to an optimizer."
    )
