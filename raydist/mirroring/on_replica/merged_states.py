"""The merge of per-replica states by the replicas themselves; the driver would have to wait for the steps first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from raydist.checkpoints.saved_kinds import SHARES
from raydist.checkpoints.sharing.share_writer import MergedStates
from raydist.mirroring.buffers.aggregation import Aggregation
from raydist.mirroring.buffers.replica_buffers import ReplicaBuffers
from raydist.mirroring.buffers.shares import aggregate
from raydist.mirroring.metric_states import hold_states, merge_states, metrics_in
from raydist.pickling.attribute_table import attributes

__all__ = ["StateMerger"]

_CPU = torch.device("cpu")


@final
class StateMerger:
    """One replica's end; all replicas call it at the same place, for the same objects.

    Args:
        buffers: The replica's.
        gather: Every replica's value of its argument, in the order of ranks.
    """

    def __init__(self, buffers: ReplicaBuffers, gather: Callable[[Any], list[Any]]) -> None:
        self._buffers = buffers
        self._gather = gather

    def __call__(self, objects: Mapping[str, Any], alone: Mapping[str, Mapping[str, int]]) -> MergedStates:
        """Return the values that the driver would read of metrics, and of buffers that differ.

        Args:
            objects: Objects by name.
            alone: By name of a metric, see `merge_states`.
        """
        metrics = {name: obj for name, obj in metrics_in(objects).items() if name in objects or _is_saved_within(obj)}
        buffers = self._differing(objects) if any(isinstance(obj, torch.nn.Module) for obj in objects.values()) else []
        if not metrics and not buffers:
            return MergedStates()
        states = {name: hold_states(metric, _CPU) for name, metric in metrics.items()}
        values = [buffer.detach().to("cpu", copy=True) for buffer, _ in buffers]
        everyone = self._gather((states, values))
        shares = {name: [held[name] for held, _ in everyone] for name in metrics}
        merged = {name: merge_states(metric, shares[name], alone.get(name, {})) for name, metric in metrics.items()}
        return MergedStates(
            {name: {**each, **_shares(shares[name])} for name, each in merged.items() if name in objects},
            nested=tuple((attributes(metrics[name]), each) for name, each in merged.items() if name not in objects),
            buffers=tuple(
                (buffer, aggregate([held[place] for _, held in everyone], how.aggregation))
                for place, (buffer, how) in enumerate(buffers)
            ),
        )

    def _differing(self, objects: Mapping[str, Any]) -> list[tuple[torch.Tensor, Aggregation]]:
        """Buffers in these objects that the driver would gather, in an order that is the same on all replicas."""
        modules = [obj for obj in objects.values() if isinstance(obj, torch.nn.Module)]
        mine = {id(buffer) for module in modules for buffer in module.buffers()}
        self._buffers.look()
        found = [(buffer, self._buffers.aggregations.of(handle, buffer)) for handle, buffer in self._buffers.items()]
        return [(buffer, how) for buffer, how in found if id(buffer) in mine and how.is_gathered]


def _is_saved_within(metric: Any) -> bool:
    """Return True if a module's `state_dict` contains states of the metric, which is so only for persistent states."""
    return any(attributes(metric)["_persistent"].values())


def _shares(shares: list[dict[str, Any]]) -> dict[str, Any]:
    return {SHARES: shares} if len(shares) > 1 else {}
