"""The strategies that `--strategy` names: a line each. Nothing else in the examples knows which one it is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch import nn

import raydist as rd


def shard_all(model: nn.Module, mesh: Any) -> None:
    """The simplest way to divide a module on a mesh; transformer_2d.py has a better one."""
    from torch.distributed.fsdp import fully_shard  # takes a second, for this strategy only

    fully_shard(model, mesh=mesh["shard"])


# By the number of replicas on each machine. A strategy on one machine has no others.
STRATEGIES: dict[str, Callable[..., rd.Strategy]] = {
    "one_device": lambda replicas: rd.OneDeviceStrategy("cpu"),
    "mirrored": lambda replicas: rd.MirroredStrategy(replicas),
    "multi_worker": lambda replicas: rd.MultiWorkerMirroredStrategy(devices_per_worker=replicas),
    "sharded": lambda replicas: rd.ShardedStrategy(replicas),
    "mesh": lambda replicas: rd.MeshStrategy({"shard": replicas}, shard_all),
    "central_storage": lambda replicas: rd.CentralStorageStrategy(replicas),
    "parameter_server": lambda replicas, **options: rd.ParameterServerStrategy(replicas, 1, **options),
    "tpu": lambda replicas: rd.TPUStrategy(),
}

# How far the workers of parameter servers may be apart.
CONSISTENCIES: dict[str, Callable[[], Any]] = {
    "async": lambda: "async",
    "bounded": lambda: rd.BoundedStaleness(4),
    "backups": lambda: rd.SyncWithBackups(1),
}


def add_strategy_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags that choose a strategy."""
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="mirrored")
    parser.add_argument(
        "--replicas", type=int, default=2, help="on each machine; one_device has one, tpu its chips; or workers"
    )
    parser.add_argument(
        "--consistency", choices=list(CONSISTENCIES), default="async", help="of parameter_server, ignored by the others"
    )
    return parser


def make_strategy(name: str, replicas: int, consistency: str = "async") -> rd.Strategy:
    """The only line that changes from one device to many."""
    options = {"consistency": CONSISTENCIES[consistency]()} if name == "parameter_server" else {}
    return STRATEGIES[name](replicas, **options)
