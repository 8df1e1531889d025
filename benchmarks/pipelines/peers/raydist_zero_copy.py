"""raydist, where a replica reads the object store's memory itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from benchmarks.pipelines.peers.raydist_distributed import queue
from benchmarks.pipelines.scene import MakePass

PASSES: Mapping[str, MakePass] = {"object_store_queue": partial(queue, zero_copy=True)}
