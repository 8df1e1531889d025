"""One replica's half: its parameters, taking over the state of another replica, and merged states for a save."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torchmetrics
from torch import nn
from torchmetrics import MeanMetric

import raydist as rd
from raydist.checkpoints.object_state import STATES_BY_RANK
from raydist.checkpoints.shards import MergedStates
from raydist.mirroring.messages import StepPayload
from raydist.mirroring.replica import MirrorReplica
from raydist.pickling.pickler import loads
from tests.mirroring.in_process import Mirror, linear, rank_of


def test_dump_and_load_are_bit_identical() -> None:
    mirror = Mirror(1)
    with mirror.scope():
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        metric = torchmetrics.MeanMetric()

    def step(rank: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.arange(6.0).reshape(3, 2)).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        metric.update(loss.detach() + rank)
        return loss.item()

    for _ in range(3):
        mirror.run(step, rank_of(mirror))
    old = mirror.replicas[0]
    newcomer = MirrorReplica(0)
    state, handles = old.dump()
    newcomer.load(pickle.loads(pickle.dumps(state)))
    assert len(handles) == len(newcomer._table.items())
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), newcomer.parameters(), strict=True))
    known = mirror.payloads[0]
    losses = []
    for replica in (old, newcomer):
        function, args, kwargs = replica.apply(StepPayload(function=known.function, arguments=known.arguments), [0])
        losses.append(function(*args, **kwargs))
    assert losses[0] == losses[1]
    optimizers = [handle for handle, obj in old._table.items() if isinstance(obj, torch.optim.Optimizer)]
    states = [loads(replica.collect_optimizer_state(optimizers[0]), lambda pid: pid) for replica in (old, newcomer)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key]["exp_avg"], states[1][key]["exp_avg"]) for key in states[0])


def test_reset_after_a_payload_that_never_arrived_or_was_not_dispatched(mirror: Mirror, layer: nn.Linear) -> None:
    step = lambda: layer.weight.tolist()  # noqa: E731
    mirror.driver.prepare(step)
    assert type(layer.weight) is nn.Parameter
    mirror.driver.prepare(step)
    mirror.driver.dispatched()
    mirror.driver.reset()
    assert type(layer.weight) is nn.Parameter
    assert mirror.run(step) == [[[1.0, 2.0]]] * 2
    layer.weight.data.fill_(3.0)
    mirror.driver.prepare(step)
    assert mirror.run(step) == [[[3.0, 3.0]]] * 2


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
    driver_items = mirror.driver.driver_items(objects)
    handles = {name: mirror.driver._table.handle_of(obj) for name, obj in objects.items()}
    own = [{name: dict(each.items())[handle or 0] for name, handle in handles.items()} for each in mirror.replicas]
    meeting = Meeting(len(own))

    def find(rank: int) -> MergedStates:
        return mirror.replicas[rank].merge_states(meeting.of(rank), own[rank], driver_items)

    with ThreadPoolExecutor(len(own)) as threads:
        return list(threads.map(find, range(len(own)))), own, meeting


class Listing(MeanMetric):
    """A metric that keeps all there was."""

    seen: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx="cat")


def test_merged_metrics_and_statistics_equal_those_the_driver_reads() -> None:
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
    assert [mirror.driver.save_mode(each) for each in objects.values()] == ["whole", "whole", "whole"]
    found, own, meeting = merged(mirror, objects)
    assert meeting.num_gathered == 1  # one meeting for all
    shares = mirror.driver.states_by_rank(mean)
    expected = {name: getattr(mean, name) for name in ("seen", "_update_count")}
    for rank, each in enumerate(found):
        for name, module in (("norm", norm), ("counts", counts)):
            held = each.within({key: value.detach() for key, value in own[rank][name].state_dict().items()})
            for key, value in module.state_dict().items():
                assert torch.equal(held[key], value), key
        assert torch.equal(torch.cat(each.metrics["mean"]["seen"]), torch.cat(expected["seen"]))
        assert each.metrics["mean"]["_update_count"] == expected["_update_count"]
        assert len(each.metrics["mean"][STATES_BY_RANK]) == len(shares) == 3
    assert torch.cat(expected["seen"]).tolist() == [9, 0, 1, 2]
    mean.reset()
    assert mirror.driver.states_by_rank(mean) == [], "no replica has what the driver wrote"


def test_items_that_the_driver_adds_come_first_once_they_are_sent() -> None:
    mirror = Mirror(2)
    with mirror.scope():
        mean = Listing()

    def step() -> None:
        mean.update(torch.tensor(1.0))
        mean.seen.append(torch.tensor([5.0]))

    mirror.run(step)
    assert mirror.driver.driver_items({"mean": mean}) == {"mean": {"seen": 0}}
    assert len(mean.seen) == 2
    mean.seen.append(torch.tensor([7.0]))
    assert mirror.driver.driver_items({"mean": mean}) == {"mean": {"seen": 3}}
    assert mirror.driver.driver_items({"fresh": Listing(), "norm": nn.BatchNorm1d(1)}) == {"fresh": {"seen": 0}}
    layer = linear(mirror)
    mirror.run(lambda: layer(torch.ones(1, 2)))
    found, _, meeting = merged(mirror, {"layer": layer})
    assert meeting.num_gathered == 0  # equal states are not gathered
    assert found[0] == MergedStates()
    assert mirror.driver.save_mode(layer) == "divided"


def test_optimizers_with_loaded_states_are_reported_once() -> None:
    mirror = Mirror(1)
    with mirror.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    mirror.run(step)
    saved = copy.deepcopy(optimizer.state_dict())
    mirror.run(step)
    replica: Any = mirror.replicas[0]
    assert replica.take_loaded_states() == frozenset()
    optimizer.load_state_dict(saved)
    mirror.run(step)
    (handle,) = replica.take_loaded_states()
    assert isinstance(replica.object_of(handle), torch.optim.Adam)
    assert replica.take_loaded_states() == frozenset()
