"""What the replicas of a strategy do beyond running steps: what a strategy of one's own may decide.

A strategy names its rules on the driver (`SynchronousStrategy.replica_rules`), and each replica gets a copy of them.
They are called in the replica's process, on every replica alike, between the parts of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raydist.values import ReduceOp

__all__ = ["ReplicaRules", "ReplicaVariables"]


class ReplicaVariables(ABC):
    """One replica's copies of what was made under the scope, and its wire to the other replicas.

    Collectives must be called by all replicas alike; each waits for the slowest of them, at most
    `Timeouts.collective_s`.

    Attributes:
        rank: This replica.
        num_replicas: All replicas.
        rows: Rows of the batch at hand on each replica; None without a batch.
    """

    rank: int
    num_replicas: int

    @property
    @abstractmethod
    def rows(self) -> tuple[int, ...] | None:
        """Rows of the batch at hand on each replica; None without a batch."""

    @abstractmethod
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Every parameter, in an order that is the same on all replicas."""

    @abstractmethod
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Every optimizer, in an order that is the same on all replicas."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> None:
        """Replace `tensor` on every replica by the reduction over all of them, those without rows included.

        Args:
            tensor: Of the same shape and dtype everywhere.
            op: SUM, MEAN (not weighted by rows), MIN, MAX or PRODUCT.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace `tensor` on every replica by that of one.

        Args:
            tensor: Of the same shape and dtype everywhere.
            root: That replica.
        """

    @abstractmethod
    def gather_numbers(self, about: str, *numbers: int) -> list[tuple[int, ...]]:
        """Every replica's numbers, in the order of the replicas: equally many of each. As cheap as a collective can be.

        Args:
            about: What they are for, in messages.
            *numbers: Of 64 bits.
        """

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every replica's value, in the order of the replicas.

        Args:
            value: This replica's. It is pickled: for small ones.
        """


class ReplicaRules:
    """What the replicas of a strategy do beyond running steps; these do nothing more.

    Derive from it, and return an instance from your strategy's `replica_rules`. It is pickled, so its class must be
    importable in Ray's workers, or belong to the program's main module. What a replica is to remember from step to step
    it keeps as attributes. Checkpoints hold what the first replica holds, and after a restore all have that.

    Attributes:
        exchanges_gradients: Gradients are global when a `backward()` returns. False declares local updates: they stay
            the replica's own (without rows it has none), replicas may differ, and `check_in_sync` is off.

    Source: tf.distribute.StrategyExtended, which strategies of one's own derive from.

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

    def restart(self) -> None:
        """The replicas form their group: at the begin, and again after a step that failed.

        All replicas hold what replica 0 holds now.
        """

    def close(self) -> None:
        """The replica is done; give back what is held."""

    def after_batch(self, variables: ReplicaVariables) -> None:
        """A batch is done: a `run` without an iterator, or what a loop does between two draws from it.

        Also where a process that is to end leaves the loop at a draw, before the checkpoint; then `after_run` follows.

        Args:
            variables: This replica's.
        """

    def after_run(self, variables: ReplicaVariables) -> None:
        """The function given to `run` has returned, on this replica; its last batch is done.

        Args:
            variables: This replica's.
        """

    def step_optimizer(
        self,
        variables: ReplicaVariables,
        optimizer: torch.optim.Optimizer,
        step: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The program has called `optimizer.step(*args, **kwargs)`.

        Args:
            variables: This replica's.
            optimizer: One of the scope's.
            step: Carries it out, on this replica.
            *args: What the program gave: nothing, or a closure.
            **kwargs: Likewise.

        Returns:
            What the program is to get.
        """
        return step(*args, **kwargs)
