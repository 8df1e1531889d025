"""The chief of `tf_servers`: `rank_tf_chief ADDRESS CLUSTER`.

Its steps are one graph a closure: variables are read once, gradients are applied by the servers' own kernels (those of
`tf.raw_ops`, where Keras's optimizers add several operations a variable), input is prefetched on the workers, and
nobody waits for a closure before all are scheduled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.asynchronous.sizes import LEARNING_RATE, TABLE_COLUMNS, TABLE_ROWS, arrays_of, size_of
from benchmarks.steps.ranks import serve_rank
from benchmarks.steps.scene import Run, timed


def dense(name: str, width_in: int, width_out: int) -> list[Any]:
    limit = 1.0 / np.sqrt(width_in)
    kernel = tf.Variable(tf.random.uniform((width_in, width_out), -limit, limit), name=f"{name}/kernel")
    return [kernel, tf.Variable(tf.zeros(width_out), name=f"{name}/bias")]


def mlp_step(width: int) -> Callable[[Any, Any], Any]:
    variables = [*dense("first", 784, width), *dense("second", width, width), *dense("third", width, 10)]

    def step(pixels: Any, labels: Any) -> Any:
        values = [variable.read_value() for variable in variables]
        with tf.GradientTape() as tape:
            tape.watch(values)
            hidden = tf.nn.relu(tf.matmul(pixels, values[0]) + values[1])
            hidden = tf.nn.relu(tf.matmul(hidden, values[2]) + values[3])
            logits = tf.matmul(hidden, values[4]) + values[5]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for variable, gradient in zip(variables, tape.gradient(loss, values), strict=True):
            descend(variable, gradient)
        return loss

    return step


def embedding_step() -> Callable[[Any, Any], Any]:
    table = tf.Variable(tf.random.normal((TABLE_ROWS, TABLE_COLUMNS)), name="table")
    kernel, bias = dense("score", TABLE_COLUMNS, 1)
    parts = list(getattr(table, "variables", [table]))
    part_rows = -(-TABLE_ROWS // len(parts))

    def step(ids: Any, targets: Any) -> Any:
        found = [tf.gather(part, where) for part, where in zip(parts, cut(ids), strict=True)]
        read = [*found, kernel.read_value(), bias.read_value()]
        with tf.GradientTape() as tape:
            tape.watch(read)
            rows = tf.concat(found, 0)
            logits = (tf.matmul(rows, read[-2]) + read[-1])[:, 0]
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(order(ids, targets), logits))
        *gradients, of_kernel, of_bias = tape.gradient(loss, read)
        for part, where, gradient in zip(parts, cut(ids), gradients, strict=True):
            tf.raw_ops.ResourceScatterSub(resource=part.handle, indices=where, updates=LEARNING_RATE * gradient)
        descend(kernel, of_kernel)
        descend(bias, of_bias)
        return loss

    def cut(ids: Any) -> list[Any]:
        """Rows of each part: parts are consecutive."""
        return (
            [ids]
            if len(parts) == 1
            else [tf.boolean_mask(ids, ids // part_rows == number) - number * part_rows for number in range(len(parts))]
        )

    def order(ids: Any, targets: Any) -> Any:
        """As the rows of the parts come."""
        return (
            targets
            if len(parts) == 1
            else tf.concat([tf.boolean_mask(targets, ids // part_rows == number) for number in range(len(parts))], 0)
        )

    return step


def descend(variable: Any, gradient: Any) -> None:
    """Where the variable lies."""
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=LEARNING_RATE, delta=gradient)


def make_runs(cluster: Mapping[str, list[str]], workload: str, folder: Path) -> Mapping[str, Run]:
    size, servers = size_of(workload), len(cluster["ps"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(dict(cluster)), rpc_layer="grpc"
    )
    partitioner = None  # whole variables: the layers of the MLP are about equally large
    if not size.width and servers > 1:
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(2**20, servers)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        step = mlp_step(size.width) if size.width else embedding_step()

    def dataset() -> Any:
        arrays = tf.data.Dataset.from_tensor_slices(arrays_of(workload, folder))
        return arrays.repeat().batch(size.rows, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no type information
    def closure(batches: Any) -> Any:
        return step(*next(batches))

    batches = iter(coordinator.create_per_worker_dataset(dataset))

    def train(count: int) -> None:
        for _ in range(count):
            loss = coordinator.schedule(closure, args=(batches,))
        coordinator.join()
        if not np.isfinite(loss.fetch()):
            raise ArithmeticError(f"the loss became {loss.fetch()}")

    return {"schedule": lambda count: timed(lambda: train(count))}


def main() -> None:
    address, cluster = sys.argv[1:]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    serve_rank(address, lambda workload, folder: make_runs(json.loads(cluster), workload, Path(folder)))


if __name__ == "__main__":
    main()
