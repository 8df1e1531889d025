from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassAccuracy,
    MulticlassAUROC,
)
from torchmetrics.wrappers import ClasswiseWrapper

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


def on_pieces(
    make: Any, predictions: list[torch.Tensor], targets: list[torch.Tensor], stand_in: int | None = None
) -> tuple[Any, list[int]]:
    """Return a metric's value after one batch in these pieces, and the number of updates of each replica."""
    rows = tuple(0 if rank == stand_in else len(piece) for rank, piece in enumerate(predictions))

    def main(group: LocalGroup) -> Metric:
        reducer: Any = NotingReducer()
        mirror: Any = Mirror(group.rank)
        peers = SyncPeers(group, reducer, torch.device("cpu"), mirror, NonfinitePolicy(lambda _: []))
        metric: Metric = make()
        with peers.run(rows, ReduceOp.MEAN, padding=True):
            context = ReplicaContext(ReplicaView(("cpu",) * len(rows)), peers)
            batch = predictions[group.rank], targets[group.rank]
            update_alike({"m": metric}, guessing({"m": metric}), batch, context)
        return metric

    metrics = run_ranks(len(rows), main)
    counted = [metric for rank, metric in enumerate(metrics) if rank != stand_in]
    merged: Metric = make()
    restore_states(merged, merge_states(merged, [hold_states(metric) for metric in counted]))
    merged._update_count = 1
    return merged.compute(), [metric.update_count for metric in metrics]


def at_once(make: Any, prediction: torch.Tensor, target: torch.Tensor) -> Any:
    metric = make()
    metric.update(prediction, target)
    return metric.compute()


LOGITS = torch.tensor([0.2, 0.9, -3.0, 0.6, 4.0, 0.7])
LABELS = torch.tensor([1, 0, 0, 1, 1, 0])


@pytest.mark.parametrize(
    "make", [BinaryAUROC, BinaryAccuracy, BinaryAveragePrecision, lambda: BinaryAUROC(ignore_index=-1)]
)
def test_pieces_that_look_different_are_seen_whole(make: Any) -> None:
    value, counts = on_pieces(make, [*LOGITS.split(2)], [*LABELS.split(2)])
    torch.testing.assert_close(value, at_once(make, LOGITS, LABELS))
    assert counts == [1, 0, 0]


def test_pieces_that_look_alike_stay_where_they_are() -> None:
    for prediction in (LOGITS - 10, LOGITS.sigmoid(), torch.tensor([1, 0, 0, 1, 1, 0])):
        value, counts = on_pieces(BinaryAccuracy, [*prediction.split(2)], [*LABELS.split(2)])
        torch.testing.assert_close(value, at_once(BinaryAccuracy, prediction, LABELS))
        assert counts == [1, 1, 1]


def test_a_metric_that_ignores_rows_may_see_other_pieces() -> None:
    def make() -> Metric:
        return BinaryAUROC(ignore_index=-1)

    # Both pieces hold a logit, but in the first one it is ignored.
    logits, labels = torch.tensor([7.0, 0.2, 0.9, -3.0, 0.5, 0.1]), torch.tensor([-1, 1, 0, 0, 1, 0])
    value, counts = on_pieces(make, [*logits.split(3)], [*labels.split(3)])
    torch.testing.assert_close(value, at_once(make, logits, labels))
    assert counts == [1, 0]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_replica_that_stands_in_has_no_say(absent: int) -> None:
    pieces, labels = [*LOGITS.split(2)], [*LABELS.split(2)]
    pieces[absent], labels[absent] = torch.tensor([100.0, -100.0]), torch.tensor([0, 1])
    rest = [rank for rank in range(3) if rank != absent]
    value, counts = on_pieces(BinaryAUROC, pieces, labels, stand_in=absent)
    expected = at_once(BinaryAUROC, torch.cat([pieces[i] for i in rest]), torch.cat([labels[i] for i in rest]))
    torch.testing.assert_close(value, expected)
    assert counts[rest[0]] + counts[rest[1]] in (1, 2)


def test_who_guesses() -> None:
    metrics = {
        "auroc": BinaryAUROC(),
        "accuracy": MulticlassAccuracy(3),
        "mse": MeanSquaredError(),
        "classes": ClasswiseWrapper(MulticlassAUROC(3, average=None)),
        "ignores": MulticlassAUROC(3, ignore_index=0),
    }
    assert guessing(metrics) == {"auroc": False, "classes": False, "ignores": True}
