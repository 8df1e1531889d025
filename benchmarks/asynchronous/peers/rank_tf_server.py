"""A worker or a parameter server of `tf_servers`: `rank_tf_server JOB INDEX CLUSTER`. It serves until it is killed."""

from __future__ import annotations

import json
import sys

import tensorflow as tf


def main() -> None:
    job, index, cluster = sys.argv[1:]
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    server = tf.distribute.Server(
        json.loads(cluster), job_name=job, task_index=int(index), protocol="grpc", config=config
    )
    server.join()


if __name__ == "__main__":
    main()
