"""Replicas as threads that restore copies of the driver's objects: a `ShardRestorer` without processes."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from raydist.actors.portable_errors import PortableError
from raydist.checkpoints.restore import PreparedShard, RestoreRequest
from raydist.checkpoints.shard_reader import ShardReader, commit_shard, discard_shard, exchange_bytes, prepare_shard
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks

CPU = torch.device("cpu")


class Replicas:
    """Each has copies of all objects, and a reader.

    Args:
        objects: The driver's.
        num_replicas: How many there are.
    """

    def __init__(self, objects: Iterable[Any], num_replicas: int = 3) -> None:
        self.num_replicas = num_replicas
        self._originals = list(objects)
        self._copies = [copy.deepcopy(self._originals) for _ in range(num_replicas)]
        self._groups: dict[int, LocalGroup] = {}
        self.readers = [
            ShardReader(rank, num_replicas, functools.partial(self._exchange, rank)) for rank in range(num_replicas)
        ]
        self.asked: list[str] = []
        self.before: Callable[[str, int], None] = lambda what, rank: None

    def of(self, rank: int, obj: Any) -> Any:
        """A replica's copy of one of the driver's objects."""
        return next(mine for mine, each in zip(self._copies[rank], self._originals, strict=True) if each is obj)

    def holds(self, obj: Any) -> bool:
        return any(each is obj for each in self._originals)

    def can_restore(self, obj: Any) -> bool:
        return not isinstance(obj, nn.BatchNorm1d)

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Sequence[PreparedShard] | None:
        return self._ask("prepare", prepare_shard, request, objects, modules)

    def commit(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        self._ask("commit", commit_shard, token, objects, modules)

    def discard(self) -> None:
        self._ask("discard", discard_shard)

    def _exchange(self, rank: int, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        group = self._groups[rank]
        exchange_bytes(parts, rank, CPU, lambda tensor, root: group.broadcast(tensor, root).wait())

    def _ask(self, what: str, function: Callable[..., bytes], *args: Any) -> list[Any]:
        self.asked.append(what)

        def body(group: LocalGroup) -> Any:
            self._groups[group.rank] = group
            self.before(what, group.rank)
            mine = [self._mine(group.rank, each) for each in args]
            return pickle.loads(function(self.readers[group.rank], *mine))

        found = run_ranks(self.num_replicas, body)
        for each in found:
            if isinstance(each, PortableError):
                raise each.restore()
        return found

    def _mine(self, rank: int, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self.of(rank, obj) for name, obj in value.items()}
        return value
