"""Synchronous data parallelism on one node with one copy of the variables, in host memory."""

from __future__ import annotations

from typing import final

from raydist.replicas.central.central_variables import CentralVariables
from raydist.replicas.rules import ReplicaRules
from raydist.strategies.one_node import OneNodeStrategy

__all__ = ["CentralStorageStrategy"]


@final
class CentralStorageStrategy(OneNodeStrategy):
    """One replica actor per device of one node, in lock step, and one copy of the variables, in the node's memory.

    Parameters and optimizer state exist once, for any number of replicas: replicas on CPUs map that copy, replicas on
    GPUs copy the parameters to their device after each update. Gradients are all-reduced, and the first replica runs
    `optimizer.step()` once, on the CPU, while the others wait. Results are those of `MirroredStrategy`. Buffers
    (running statistics) and gradients are private to each replica, and so are, during a step, pages of parameters that
    the step writes outside an optimizer. With one replica, the variables are private memory of that replica.

    It takes less memory than `MirroredStrategy`, and less work in `optimizer.step()`; on GPUs an update costs a copy to
    the host and back. Memory must be shared, so all replicas are in one container, with the variables' size in
    `/dev/shm`. The GPU path was tested with copies on the CPU only.

    Args:
        devices: A count, or names: "cpu", "CPU:1", "GPU:0", "cuda:1", torch.device. Default: all GPUs of the node
            with most of them, else one replica per CPU core.
        communication_options: Options for the exchange of gradients and values.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica; see `MirroredStrategy`.

    Raises:
        InvalidArgumentError: An unknown device, two kinds at once, none, or the same twice; a GPU that no node has.
        DeadlineExceededError: (at the scope) the cluster can't place the replicas within `timeouts.start_s`.
        UnavailableError: (at a step) the variables don't fit into `/dev/shm`, or replicas see another `/dev/shm`.
        CollectiveMismatchError: (at a step) replicas wrote different values to a parameter outside an optimizer.

    Source: tf.distribute.experimental.CentralStorageStrategy.

    >>> strategy = CentralStorageStrategy(["CPU:0", "CPU:1"])  # nothing is started yet
    >>> strategy.close()
    """

    def replica_rules(self) -> ReplicaRules:
        return CentralVariables()
