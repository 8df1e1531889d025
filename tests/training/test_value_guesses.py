"""Metrics that guess from values whether they are logits see all pieces of a batch alike."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import Metric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision

from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.context.replica_context import ReplicaContext
from raydist.core.values import ReduceOp
from raydist.mirroring.lazy_states import hold_states, merge_states, restore_states
from raydist.replicas.function_calls import ReplicaView
from raydist.replicas.sync_peers import SyncPeers
from raydist.training.steps import guessing, update_alike
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks
from tests.replicas.test_sync_peers import Mirror, NotingReducer


def on_pieces(make: Any, pieces: Any, targets: Any, stand_in: int | None = None) -> tuple[Any, list[int]]:
    """Return a metric's value after one batch in these pieces, and the number of updates of each replica."""
    rows = tuple(0 if rank == stand_in else len(piece) for rank, piece in enumerate(pieces))

    def main(group: LocalGroup) -> Metric:
        reducer: Any = NotingReducer()
        mirror: Any = Mirror(group.rank)
        peers = SyncPeers(group, reducer, torch.device("cpu"), mirror, NonfinitePolicy(lambda _: []))
        metric: Metric = make()
        with peers.run(rows, ReduceOp.MEAN, padding=True):
            context = ReplicaContext(ReplicaView(("cpu",) * len(rows)), peers)
            batch = pieces[group.rank], targets[group.rank]
            update_alike({"m": metric}, guessing({"m": metric}), batch, context)
        return metric

    metrics = run_ranks(len(rows), main)
    counted = [metric for rank, metric in enumerate(metrics) if rank != stand_in]
    merged: Metric = make()
    restore_states(merged, merge_states(merged, [hold_states(metric) for metric in counted]))
    merged._update_count = 1
    return merged.compute(), [metric.update_count for metric in metrics]


def ignoring() -> Metric:
    return BinaryAUROC(ignore_index=-1)


LOGITS = torch.tensor([0.2, 0.9, -3.0, 0.6, 4.0, 0.7])
LABELS = torch.tensor([1, 0, 0, 1, 1, 0])


def test_pieces_that_look_different_are_seen_whole_by_one_replica() -> None:
    logits, labels = torch.tensor([7.0, 0.2, 0.9, -3.0, 0.5, 0.1]), torch.tensor([-1, 1, 0, 0, 1, 0])
    cases: list[tuple[Any, torch.Tensor, torch.Tensor, list[int]]] = [
        *(
            (make, LOGITS, LABELS, [1, 0, 0])
            for make in (BinaryAUROC, BinaryAccuracy, BinaryAveragePrecision, ignoring)
        ),
        *((BinaryAccuracy, alike, LABELS, [1, 1, 1]) for alike in (LOGITS - 10, LOGITS.sigmoid(), LABELS)),
        (ignoring, logits, labels, [1, 0]),  # both pieces hold a logit, but in the first one it is ignored
    ]
    for make, prediction, target, expected in cases:
        size = len(target) // len(expected)
        value, counts = on_pieces(make, prediction.split(size), target.split(size))
        metric = make()
        metric.update(prediction, target)
        torch.testing.assert_close(value, metric.compute(), msg=f"{make} {prediction}")
        assert counts == expected, (make, prediction)


def test_a_replica_that_stands_in_has_no_say() -> None:
    for absent in (0, 1):
        pieces, labels = [*LOGITS.split(2)], [*LABELS.split(2)]
        pieces[absent], labels[absent] = torch.tensor([100.0, -100.0]), torch.tensor([0, 1])
        rest = [rank for rank in range(3) if rank != absent]
        value, counts = on_pieces(BinaryAUROC, pieces, labels, stand_in=absent)
        metric = BinaryAUROC()
        metric.update(torch.cat([pieces[i] for i in rest]), torch.cat([labels[i] for i in rest]))
        torch.testing.assert_close(value, metric.compute())
        assert counts[rest[0]] + counts[rest[1]] in (1, 2)
