"""raydist: two workers of one replica, each on a node of a Ray cluster. The nodes are raylets of this machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import ray
from ray.cluster_utils import Cluster

import raydist as rd
from benchmarks.steps.peers.raydist_replicas import runs_of
from benchmarks.steps.scene import Run, Scene


def make_runs(scene: Scene) -> Mapping[str, Run]:
    start_nodes(scene, scene.ranks)
    # Replicas share memory inside a node only, whatever machine it is on.
    return runs_of(scene, rd.MultiWorkerMirroredStrategy(scene.ranks, 1))


def start_nodes(scene: Scene, count: int) -> None:
    """So many nodes of one CPU, the first of which is the driver's; they end with the scene."""
    nodes = Cluster()
    scene.resources.callback(nodes.shutdown)
    for _ in range(count):
        nodes.add_node(num_cpus=1, include_dashboard=False, object_store_memory=500 * 2**20)
    ray.init(nodes.address, logging_level=logging.ERROR, log_to_driver=False)
    scene.resources.callback(ray.shutdown)
