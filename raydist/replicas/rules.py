"""Rules: actions of a strategy's replicas besides running steps, which custom strategies may override.

A strategy names its rules on the driver (`SynchronousStrategy.replica_rules`), and each replica gets a copy of them.
Every replica calls the rules in its own process, between the parts of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from raydist.collectives.base import Communicator
from raydist.core.values import ReduceOp
from raydist.mirroring.replica import MirrorReplica


class ReplicaVariables:
    """One replica's copies of the variables of the scope, and collectives with the other replicas.

    All replicas must call the same collectives in the same order. Each collective waits for the slowest replica, for at
    most `Timeouts.collective_s`. raydist makes the objects of this class.

    Args:
        communicator: The communicator of values.
        mirror: The mirrored objects of the replica.
        gather: Returns every replica's value of its argument, in rank order.
        rows: Returns the rows of the current batch.

    Attributes:
        rank: Rank of this replica.
        num_replicas: Number of replicas.
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
        """Rows of the current batch on each replica; None without a batch."""
        return self._rows()

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Return every parameter, in an order that is the same on all replicas."""
        return self._mirror.parameters()

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return every optimizer, in an order that is the same on all replicas."""
        return self._mirror.optimizer_log.optimizers()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> None:
        """Replace `tensor` on every replica by the reduction over all replicas, including replicas without rows.

        Args:
            tensor: A tensor of the same shape and dtype on all replicas.
            op: SUM, MEAN (not weighted by rows), MIN, MAX or PRODUCT.
        """
        self._communicator.all_reduce(tensor, ReduceOp.parse(op)).wait()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace `tensor` on every replica by the tensor of replica `root`.

        Args:
            tensor: A tensor of the same shape and dtype on all replicas.
            root: Rank of the replica whose tensor is sent.
        """
        self._communicator.broadcast(tensor, root).wait()

    def gather_numbers(self, about: str, *numbers: int) -> list[tuple[int, ...]]:
        """Return every replica's numbers in rank order. All replicas pass equally many. The cheapest collective.

        Args:
            about: Purpose of the numbers, for messages.
            *numbers: Integers of 64 bits.
        """
        mine = torch.tensor(numbers, device=self._communicator.device)
        rows = [torch.empty_like(mine) for _ in range(self.num_replicas)]
        self._communicator.announce(about)
        self._communicator.all_gather(rows, mine).wait()
        return [tuple(row.tolist()) for row in rows]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every replica's value in rank order.

        Args:
            value: The value of this replica. It is pickled, so it should be small.
        """
        return self._gather(value)


@final
class VariablesView(ReplicaVariables):
    """The variables of a replica for raydist's own rules, which also see other mirrored objects."""

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


class StrategyHooks:
    """Rules of a strategy's replicas; the base class does nothing besides running steps.

    Derive from this class, and return an instance from your strategy's `replica_rules`. The instance is pickled, so its
    class must be importable in Ray's workers, or belong to the program's main module. State that lives from step to
    step goes into attributes. Checkpoints hold the attributes of the first replica, and a restore sets them everywhere.

    Attributes:
        exchanges_gradients: Gradients are global when `backward()` returns. With False, gradients stay on the replica
            (without rows there are none), replicas may differ, and `param_sync_every` is off.
        replicates_optimizer_state: Every replica has the state of the optimizers. With False,
            `param_sync_every` compares parameters only.

    Source: tf.distribute.StrategyExtended, from which custom strategies derive.

    Example::

        class AverageEvery(rd.StrategyHooks):
            exchanges_gradients = False

            def __init__(self, every):
                self.every, self.num_batches = every, 0

            def after_batch(self, variables):
                self.num_batches += 1
                if self.num_batches % self.every == 0:
                    for parameter in variables.parameters():
                        variables.all_reduce(parameter.data, "MEAN")
    """

    exchanges_gradients: bool = True
    replicates_optimizer_state: bool = True

    def restart(self) -> None:
        """Reset the rules when the replicas form their group: at the start, and again after a step that failed.

        All replicas hold the values of replica 0 at this point.
        """

    def close(self) -> None:
        """Release resources; the replica ends."""

    def after_batch(self, variables: ReplicaVariables) -> None:
        """Act after a batch: after a `run` without an iterator, or after each part of a loop between two draws.

        Also called before the checkpoint of a preempted process that leaves its loop at a draw; `after_run` follows.

        Args:
            variables: The variables of this replica.
        """

    def after_run(self, variables: ReplicaVariables) -> None:
        """Act after the function given to `run` has returned on this replica, and its last batch is done.

        Args:
            variables: The variables of this replica.
        """

    def step_optimizer(
        self,
        variables: ReplicaVariables,
        optimizer: torch.optim.Optimizer,
        step: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Carry out a call `optimizer.step(*args, **kwargs)` of the program.

        Args:
            variables: The variables of this replica.
            optimizer: An optimizer of the scope.
            step: Runs the optimizer's step on this replica.
            *args: Arguments of the program: nothing, or a closure.
            **kwargs: Keyword arguments of the program.

        Returns:
            The value that the program's call returns.
        """
        return step(*args, **kwargs)
