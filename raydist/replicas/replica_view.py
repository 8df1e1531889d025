"""The strategy inside a step function, and the variables that a replica's rules get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import torch

from raydist.collectives.base import Communicator
from raydist.context.step_counter import StepCounter
from raydist.context.strategy import Strategy
from raydist.errors import FailedPreconditionError
from raydist.mirroring.on_replica.replica import MirrorReplica
from raydist.replicas.rules import ReplicaVariables
from raydist.values import ReduceOp

__all__ = ["ReplicaView", "VariablesView"]


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: ReplicaView, *args: Any, **kwargs: Any) -> NoReturn:
        raise FailedPreconditionError(
            f"{what} is for the driver: this code runs inside of a replica, in strategy.run. Call it around the step."
        )

    return refuse


@final
class ReplicaView(Strategy):
    """The strategy inside a replica: `ctx.strategy` and `rd.get_strategy()`.

    Args:
        worker_devices: One name per replica.
        objects: Returns the mirrored objects of the replica.
    """

    def __init__(self, worker_devices: tuple[str, ...], objects: Callable[[], Sequence[Any]] = tuple) -> None:
        super().__init__()
        self._worker_devices = worker_devices
        self._objects = objects

    @property
    def num_replicas_in_sync(self) -> int:
        return len(self._worker_devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._worker_devices

    def _find_counter(self) -> StepCounter | None:
        return next((found for found in self._objects() if isinstance(found, StepCounter)), None)

    _mark_created = _set_gradient_reduce_op = _refused("strategy.scope")
    run = _refused("strategy.run")
    distribute_dataset = _refused("strategy.distribute_dataset")
    distribute_datasets_from_function = _refused("strategy.distribute_datasets_from_function")
    distribute_values_from_function = _refused("strategy.distribute_values_from_function")
    stats = _refused("strategy.stats")
    close = _abort = _refused("strategy.close")


@final
class VariablesView(ReplicaVariables):
    """The mirrored objects and the communicator of one replica, for rules.

    Args:
        communicator: The communicator of values.
        mirror: The mirrored objects of the replica.
        gather: Returns every replica's value of its argument, in rank order.
        rows: Returns the rows of the current batch.
    """

    def __init__(
        self,
        communicator: Communicator,
        mirror: MirrorReplica,
        gather: Callable[[Any], list[Any]],
        rows: Callable[[], tuple[int, ...] | None],
    ) -> None:
        self.rank, self.num_replicas = communicator.rank, communicator.world_size
        self._communicator = communicator
        self._mirror = mirror
        self._gather = gather
        self._rows = rows

    @property
    def rows(self) -> tuple[int, ...] | None:
        return self._rows()

    def items(self) -> Sequence[tuple[int, Any]]:
        """Return handles and mirrored objects of every kind, in an order that is the same on all replicas."""
        return self._mirror.items()

    @property
    def changes(self) -> int:
        """A number that changes when mirrored objects are added or removed."""
        return self._mirror.changes

    def take_loaded_states(self) -> frozenset[int]:
        """Return the handles of optimizers whose state the driver has replaced since the last call."""
        return self._mirror.take_loaded_states()

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return self._mirror.parameters()

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._mirror.updates.optimizers()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> None:
        self._communicator.all_reduce(tensor, ReduceOp.parse(op)).wait()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self._communicator.broadcast(tensor, root).wait()

    def gather_numbers(self, about: str, *numbers: int) -> list[tuple[int, ...]]:
        mine = torch.tensor(numbers, device=self._communicator.device)
        rows = [torch.empty_like(mine) for _ in range(self.num_replicas)]
        self._communicator.announce(about)
        self._communicator.all_gather(rows, mine).wait()
        return [tuple(row.tolist()) for row in rows]

    def gather_objects(self, value: Any) -> list[Any]:
        return self._gather(value)
