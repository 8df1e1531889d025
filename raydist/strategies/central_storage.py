"""Synchronous data parallelism on one node with one state of the optimizers, in host memory."""

from __future__ import annotations

from typing import final

from raydist.replicas.central_variables import CentralVariables
from raydist.replicas.rules import ReplicaRules
from raydist.strategies.one_node import OneNodeStrategy

__all__ = ["CentralStorageStrategy"]


@final
class CentralStorageStrategy(OneNodeStrategy):
    """One replica actor per device of one node, in lock step, and one state of the optimizers, in the node's memory.

    Replicas compute with copies of the parameters. Gradients are all-reduced, and the first replica runs
    `optimizer.step()` once, on the CPU, while the others wait; then it sends the parameters to the others. Results are
    those of `MirroredStrategy`. A step that reads `optimizer.state` finds it on the first replica only, except for
    optimizers that are given a closure: every replica steps these.

    It takes less memory than `MirroredStrategy`: the state of Adam is twice the size of the parameters. All replicas
    together do less work in `optimizer.step()`; on GPUs an update costs a copy to the host and back. The GPU path was
    tested with copies on the CPU only.

    Args:
        devices: A count, or names: "cpu", "CPU:1", "GPU:0", "cuda:1", torch.device. Default: all GPUs of the node
            with most of them, else one replica per CPU core.
        communication_options: Options for the exchange of gradients and values.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica; see `MirroredStrategy`.

    Raises:
        InvalidArgumentError: An unknown device, two kinds at once, none, or the same twice; a GPU that no node has.
        DeadlineExceededError: (at the scope) the cluster can't place the replicas within `timeouts.start_s`.
        CollectiveMismatchError: (at a step) replicas step different optimizers.

    Source: tf.distribute.experimental.CentralStorageStrategy.

    >>> strategy = CentralStorageStrategy(["CPU:0", "CPU:1"])  # nothing is started yet
    >>> strategy.close()
    """

    def replica_rules(self) -> ReplicaRules:
        return CentralVariables()
