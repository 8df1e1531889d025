"""Synchronous data parallelism on one node with one copy of the variables, in the node's memory."""

from __future__ import annotations

from typing import final

from raydist.replicas.central.central_variables import CentralVariables
from raydist.replicas.rules import ReplicaRules
from raydist.strategies.one_node import OneNodeStrategy

__all__ = ["CentralStorageStrategy"]


@final
class CentralStorageStrategy(OneNodeStrategy):
    """One replica actor per device of one node, in lock step, and one copy of the variables, in the node's memory.

    Parameters, and what optimizers remember, exist once, however many replicas there are: replicas on CPUs map that
    copy, replicas on GPUs copy the parameters to their device after each update. Gradients meet in an all-reduce, and
    `optimizer.step()` is carried out once, on the CPU, by the first replica; the others wait for it. Results are those
    of `MirroredStrategy`. Buffers (running statistics) and gradients are each replica's own, and so are, for the time
    of a step, pages of parameters that it writes by hand. With one replica the variables are where that is.

    It takes less memory than `MirroredStrategy`, and `optimizer.step()` less work; on GPUs updates cost a copy to the
    host and back. Memory must be shared, so all replicas are in one container, with the variables' size in `/dev/shm`.
    The replicas' part on GPUs was tested with copies on the CPU only.

    Args:
        devices: A count, or names: "cpu", "CPU:1", "GPU:0", "cuda:1", torch.device. Default: all GPUs of the node
            with most of them, else one replica per CPU core.
        communication_options: How the replicas exchange gradients and values.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica; see `MirroredStrategy`.

    Raises:
        InvalidArgumentError: An unknown device, two kinds at once, none, or the same twice; a GPU that no node has.
        DeadlineExceededError: (at the scope) the cluster can't place the replicas within `timeouts.start_s`.
        UnavailableError: (at a step) the variables don't fit into `/dev/shm`, or the replicas see different ones.
        CollectiveMismatchError: (at a step) replicas wrote different values to a parameter by hand.

    Source: tf.distribute.experimental.CentralStorageStrategy.

    >>> strategy = CentralStorageStrategy(["CPU:0", "CPU:1"])  # nothing is started yet
    >>> strategy.close()
    """

    def replica_rules(self) -> ReplicaRules:
        return CentralVariables()
