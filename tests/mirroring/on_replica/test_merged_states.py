"""What replicas merge themselves is what the driver would read of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torchmetrics import MeanMetric

import raydist as rd
from raydist.checkpoints.saved_kinds import SHARES
from raydist.checkpoints.sharing.share_writer import MergedStates
from tests.mirroring.in_process import Mirror, rank_of


class Meeting:
    """A gather among threads."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=10)
        self.num_gathered = 0

    def of(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self.values[rank] = value
            if self.barrier.wait() == 0:
                self.num_gathered += 1
            return list(self.values)

        return gather


def merged(mirror: Mirror, objects: Mapping[str, Any]) -> tuple[list[MergedStates], list[dict[str, Any]], Meeting]:
    """By replica what it finds, and its own objects of these names."""
    alone = mirror.driver.items_alone(objects)
    handles = {name: mirror.driver._table.handle_of(obj) for name, obj in objects.items()}
    own = [{name: dict(each.items())[handle or 0] for name, handle in handles.items()} for each in mirror.replicas]
    meeting = Meeting(len(own))

    def find(rank: int) -> MergedStates:
        return mirror.replicas[rank].merger(meeting.of(rank))(own[rank], alone)

    with ThreadPoolExecutor(len(own)) as threads:
        return list(threads.map(find, range(len(own)))), own, meeting


class Listing(MeanMetric):
    """A metric that keeps all there was."""

    seen: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx="cat")


def test_metrics_and_running_statistics_are_what_the_driver_reads() -> None:
    mirror = Mirror(3)
    with mirror.scope():
        norm, mean = nn.BatchNorm1d(2), Listing()
        counts: Any = nn.Module()
        counts.register_buffer("rows", torch.zeros(2))
        rd.set_aggregation(counts, "rows", aggregation="sum")
    mean.seen = [torch.tensor([9.0])]  # the program's own, of the first replica then

    def step(rank: int) -> None:
        norm(torch.arange(8.0).reshape(4, 2) * (rank + 1))
        counts.rows += rank + 1
        mean.update(torch.tensor(float(rank)), weight=rank)
        mean.seen.append(torch.tensor([float(rank)]))

    mirror.run(step, rank_of(mirror))
    objects = {"norm": norm, "mean": mean, "counts": counts}
    assert [mirror.driver.how_saved(each) for each in objects.values()] == ["whole", "whole", "whole"]
    found, own, meeting = merged(mirror, objects)
    assert meeting.num_gathered == 1  # one meeting for all
    shares = mirror.driver.metric_shares(mean)
    expected = {name: getattr(mean, name) for name in ("seen", "_update_count")}
    for rank, each in enumerate(found):
        for name, module in (("norm", norm), ("counts", counts)):
            held = each.within({key: value.detach() for key, value in own[rank][name].state_dict().items()})
            for key, value in module.state_dict().items():
                assert torch.equal(held[key], value), key
        assert torch.equal(torch.cat(each.metrics["mean"]["seen"]), torch.cat(expected["seen"]))
        assert each.metrics["mean"]["_update_count"] == expected["_update_count"]
        assert len(each.metrics["mean"][SHARES]) == len(shares) == 3
    assert torch.cat(expected["seen"]).tolist() == [9, 0, 1, 2]


def test_items_that_the_driver_adds_come_first_once_they_are_sent() -> None:
    mirror = Mirror(2)
    with mirror.scope():
        mean = Listing()

    def step() -> None:
        mean.update(torch.tensor(1.0))
        mean.seen.append(torch.tensor([5.0]))

    mirror.run(step)
    assert mirror.driver.items_alone({"mean": mean}) == {"mean": {"seen": 0}}
    assert len(mean.seen) == 2
    mean.seen.append(torch.tensor([7.0]))
    assert mirror.driver.items_alone({"mean": mean}) == {"mean": {"seen": 3}}
    assert mirror.driver.items_alone({"fresh": Listing(), "norm": nn.BatchNorm1d(1)}) == {"fresh": {"seen": 0}}


def test_nothing_is_gathered_where_all_hold_the_same() -> None:
    mirror = Mirror(2)
    with mirror.scope():
        layer = nn.Linear(2, 1)
    mirror.run(lambda: layer(torch.ones(1, 2)))
    found, _, meeting = merged(mirror, {"layer": layer})
    assert meeting.num_gathered == 0
    assert found[0] == MergedStates()
    assert mirror.driver.how_saved(layer) == "divided"


def test_metrics_in_modules_are_merged_where_the_modules_state_has_them() -> None:
    mirror = Mirror(2)
    with mirror.scope():
        model: Any = nn.ModuleDict({"layer": nn.Linear(1, 1), "mean": Listing(), "kept": nn.ModuleList([Listing()])})
        model["kept"][0].persistent(True)
    model["kept"][0].seen = [torch.tensor([9.0])]

    def step(rank: int) -> None:
        model["layer"](torch.ones(1, 1))
        for metric in (model["mean"], model["kept"][0]):
            metric.update(torch.tensor(float(rank)), weight=rank + 1)
            metric.seen.append(torch.tensor([float(rank)]))

    mirror.run(step, rank_of(mirror))
    assert mirror.driver.how_saved(model) == "whole"
    found, own, meeting = merged(mirror, {"model": model})
    assert meeting.num_gathered == 1
    expected = model.state_dict()
    assert [key for key in expected if key.startswith("mean")] == []  # as torchmetrics has it
    assert torch.cat(expected["kept.0.seen"]).tolist() == [9, 0, 1]
    for each, mine in zip(found, own, strict=True):
        before = mine["model"].state_dict()
        with each.shown():
            state = mine["model"].state_dict()
        assert state.keys() == expected.keys()
        assert torch.equal(state["kept.0.mean_value"], expected["kept.0.mean_value"])
        assert torch.equal(torch.cat(state["kept.0.seen"]), torch.cat(expected["kept.0.seen"]))
        after = mine["model"].state_dict()
        assert torch.equal(after["kept.0.mean_value"], before["kept.0.mean_value"])
        assert len(after["kept.0.seen"]) == len(before["kept.0.seen"])
