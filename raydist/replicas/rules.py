"""Rules: actions of a strategy's replicas besides running steps, which custom strategies may override.

A strategy names its rules on the driver (`SynchronousStrategy.replica_rules`), and each replica gets a copy of them.
Every replica calls the rules in its own process, between the parts of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raydist.values import ReduceOp

__all__ = ["ReplicaRules", "ReplicaVariables"]


class ReplicaVariables(ABC):
    """One replica's copies of the variables of the scope, and collectives with the other replicas.

    All replicas must call the same collectives in the same order. Each collective waits for the slowest replica, for at
    most `Timeouts.collective_s`.

    Attributes:
        rank: Rank of this replica.
        num_replicas: Number of replicas.
        rows: Rows of the current batch on each replica; None without a batch.
    """

    rank: int
    num_replicas: int

    @property
    @abstractmethod
    def rows(self) -> tuple[int, ...] | None:
        """Rows of the current batch on each replica; None without a batch."""

    @abstractmethod
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Return every parameter, in an order that is the same on all replicas."""

    @abstractmethod
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return every optimizer, in an order that is the same on all replicas."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> None:
        """Replace `tensor` on every replica by the reduction over all replicas, including replicas without rows.

        Args:
            tensor: A tensor of the same shape and dtype on all replicas.
            op: SUM, MEAN (not weighted by rows), MIN, MAX or PRODUCT.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace `tensor` on every replica by the tensor of replica `root`.

        Args:
            tensor: A tensor of the same shape and dtype on all replicas.
            root: Rank of the replica whose tensor is sent.
        """

    @abstractmethod
    def gather_numbers(self, about: str, *numbers: int) -> list[tuple[int, ...]]:
        """Return every replica's numbers in rank order. All replicas pass equally many. The cheapest collective.

        Args:
            about: Purpose of the numbers, for messages.
            *numbers: Integers of 64 bits.
        """

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Return every replica's value in rank order.

        Args:
            value: The value of this replica. It is pickled, so it should be small.
        """


class ReplicaRules:
    """Rules of a strategy's replicas; the base class does nothing besides running steps.

    Derive from this class, and return an instance from your strategy's `replica_rules`. The instance is pickled, so its
    class must be importable in Ray's workers, or belong to the program's main module. State that lives from step to
    step goes into attributes. Checkpoints hold the attributes of the first replica, and a restore sets them everywhere.

    Attributes:
        exchanges_gradients: Gradients are global when `backward()` returns. With False, gradients stay on the replica
            (without rows there are none), replicas may differ, and `check_in_sync` is off.
        replicates_optimizer_state: Every replica has the state of the optimizers. With False `check_in_sync` compares
            parameters only.

    Source: tf.distribute.StrategyExtended, from which custom strategies derive.

    Example::

        class AverageEvery(rd.ReplicaRules):
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
