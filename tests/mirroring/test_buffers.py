"""Buffers, which may differ between replicas: aggregations, what a step assigns, and shares of values that add up."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import raydist as rd
from raydist.core.values import PerReplica
from raydist.mirroring.aggregation import aggregate, share_of, wide
from raydist.mirroring.replica import MirrorReplica
from raydist.mirroring.tensor import MirroredTensor
from tests.mirroring.in_process import Mirror, rank_of


class Holder(nn.Module):
    """One buffer."""

    held: torch.Tensor

    def __init__(self, value: Any = 0.0, **how: Any) -> None:
        super().__init__()
        self.register_buffer("held", torch.as_tensor(value))
        if how:
            rd.set_aggregation(self, "held", **how)


def holder(mirror: Mirror, value: Any = 0.0, **how: Any) -> Holder:
    with mirror.scope():
        return Holder(value, **how)


def on_replicas(mirror: Mirror) -> list[Any]:
    return [replica.export_buffers()[0].tolist() for replica in mirror.replicas]


# tf.distribute's table of variables that are aggregated on reading: replicas assign 1 and 2, or add them to 10.
@pytest.mark.parametrize(("how", "assigned", "added"), [("sum", 3.0, 13.0), ("mean", 1.5, 11.5), ("first", 1.0, 11.0)])
def test_read_on_the_driver(how: str, assigned: float, added: float, mirror: Mirror) -> None:
    module = holder(mirror, aggregation=how)
    mirror.run(lambda rank: module.held.fill_(rank + 1.0).sum(), rank_of(mirror))
    assert module.held.item() == assigned
    module.held.fill_(10.0)
    mirror.run(lambda rank: module.held.add_(rank + 1.0).sum(), rank_of(mirror))
    assert module.held.item() == added
    assert module.state_dict()["held"].item() == added
    mirror.run(lambda: module.held.item())
    mirror.run(lambda: module.held.item())
    assert mirror.bytes_of_last["writes"] == 0
    module.double()  # a cast keeps the aggregation
    mirror.run(lambda rank: module.held.add_(rank).sum(), rank_of(mirror))
    mirror.driver.release()
    assert module.held.item() == added + {"sum": 1.0, "mean": 0.5, "first": 0.0}[how]
    assert (type(module.held), module.held.dtype) == (torch.Tensor, torch.float64)


def test_a_later_choice_of_sum_keeps_the_value_also_by_a_path_from_an_outer_module(mirror: Mirror) -> None:
    with mirror.scope():
        model = nn.Sequential(nn.Linear(1, 1), Holder(aggregation="mean"))
    module: Any = model[1]
    mirror.run(lambda rank: module.held.fill_(2.0 * rank + 2.0).sum(), rank_of(mirror))
    rd.set_aggregation(model, "1.held", aggregation=rd.ReduceOp.SUM, synchronization="ON_READ")
    assert module.held.item() == 3.0
    mirror.run(lambda rank: module.held.add_(rank + 1.0).sum(), rank_of(mirror))
    assert model.state_dict()["1.held"].item() == 6.0
    assert on_replicas(mirror) == [2.5, 3.5]


@pytest.mark.parametrize("inside", [False, True])
def test_copies_keep_the_aggregation(inside: bool, mirror: Mirror) -> None:
    module = holder(mirror, aggregation="sum")
    mirror.run(lambda rank: module.held.add_(rank + 1.0).sum(), rank_of(mirror))
    if inside:
        with mirror.scope():
            twin = copy.deepcopy(module)
    else:
        snapshot = io.BytesIO()
        torch.save(module, snapshot)
        snapshot.seek(0)
        with mirror.scope():
            twin = torch.load(snapshot, weights_only=False)
    assert mirror.run(lambda: twin.held.item()) == [1.5, 1.5]
    mirror.run(lambda: twin.held.add_(1.0).sum())
    assert (module.held.item(), twin.held.item()) == (3.0, 5.0)


def test_a_new_replica_adds_nothing() -> None:
    mirror = Mirror(2)
    module = holder(mirror, aggregation="sum")
    mirror.run(lambda rank: module.held.add_(rank + 1.0).sum(), rank_of(mirror))
    mirror.link.replicas[1] = MirrorReplica(1, world_size=2)
    mirror.driver.reset()
    assert module.held.item() == 1.0
    first, second = mirror.replicas
    second.import_buffers(first.export_buffers(), second.export_buffers())  # each keeps its own share
    assert on_replicas(mirror) == [1.0, 0.0]
    second.import_buffers(first.export_buffers())
    assert on_replicas(mirror) == [1.0, 1.0]


def test_dropped_modules_are_forgotten(mirror: Mirror) -> None:
    modules = [holder(mirror, aggregation="sum", synchronization="on_write")]
    mirror.run(lambda module: module.held.item(), modules[0])
    assert [len(replica.written_buffers()) for replica in mirror.replicas] == [1, 1]
    modules.clear()
    mirror.run(lambda: 1)
    mirror.run(lambda: 1)
    assert [replica.written_buffers() for replica in mirror.replicas] == [[], []]


def test_shared_buffers_have_one_aggregation(mirror: Mirror) -> None:
    with mirror.scope():
        one, other = Holder(), Holder()
        other.held = one.held
    rd.set_aggregation(one, "held", aggregation="sum")
    mirror.run(lambda rank: (one.held.add_(rank + 1.0), other.training), rank_of(mirror))
    assert other.held.item() == 3.0
    rd.set_aggregation(other, "held", aggregation="mean")
    with pytest.raises(rd.FailedPreconditionError, match="'held' of Holder is .*mean.*Call rd.set_aggregation alike"):
        mirror.run(lambda: (one.training, other.training))


def test_bad_choices() -> None:
    table: list[tuple[Any, str, dict[str, Any], str]] = [
        (None, "weight", {"aggregation": "mean"}, "'weight' of BatchNorm1d is a parameter: the same on every replica"),
        (None, "mean", {"aggregation": "mean"}, "which has 'running_mean', 'running_var', 'num_batches_tracked'"),
        (None, "0.running_mean", {"aggregation": "mean"}, "must be a buffer of BatchNorm1d"),
        (None, "running_mean", {"aggregation": "max"}, r'must be "mean", "sum" or "first", got \'max\''),
        (None, "running_mean", {"aggregation": "none"}, "replicas differ unnoticed"),
        (None, "running_mean", {"aggregation": rd.ReduceOp.MAX}, 'must be "mean", "sum" or "first"'),
        (None, "running_mean", {"aggregation": "sum", "synchronization": "none"}, 'must be "on_read"'),
        (None, "num_batches_tracked", {"aggregation": "mean"}, 'A mean must be .* torch.int64. Use "first" or "sum"'),
        (Holder(True), "held", {"aggregation": "sum"}, "A sum must be a value .* torch.bool"),
        (Holder(torch.eye(2).to_sparse()), "held", {"aggregation": "sum"}, "Only dense buffers are aggregated"),
        ([], "held", {"aggregation": "sum"}, "belongs to a torch.nn.Module, got list"),
    ]
    for module, name, how, message in table:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            rd.set_aggregation(nn.BatchNorm1d(1) if module is None else module, name, **how)


def test_on_one_device_it_changes_nothing_and_in_a_step_it_is_an_error() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope():
        module = Holder(2.0, aggregation="sum", synchronization="on_write")
    strategy.run(lambda: module.held.add_(1.0))
    assert module.held.item() == 3.0
    assert copy.deepcopy(module).held.item() == 3.0
    with pytest.raises(rd.FailedPreconditionError, match="must be called by the driver"):
        strategy.run(lambda: rd.set_aggregation(module, "held", aggregation="sum"))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([torch.int64, torch.float64]),
    st.lists(
        st.tuples(st.sampled_from(["step", "assign", "write", "add", "fail", "read"]), st.integers(-50, 50)), max_size=8
    ),
)
def test_a_sum_equals_that_of_one_device(num_replicas: int, dtype: torch.dtype, program: list[tuple[str, int]]) -> None:
    mirror, total = Mirror(num_replicas), 5
    module = holder(mirror, torch.tensor(5, dtype=dtype), aggregation="sum")
    ranks = range(num_replicas)

    def step(number: int) -> None:
        module.held += number

    def step_anew(number: int) -> None:
        module.held = module.held + number

    for kind, number in program:
        if kind in ("step", "assign"):
            mirror.run(step if kind == "step" else step_anew, PerReplica([number + rank for rank in ranks]))
            total += sum(number + rank for rank in ranks)
        elif kind == "write":
            module.load_state_dict({"held": torch.tensor(number)})
            total = number
        elif kind == "add":
            module.held.add_(number)
            total += number
        elif kind == "fail":
            mirror.run(lambda: module.training)
            mirror.driver.reset(number % num_replicas)
        else:
            assert module.held.item() == pytest.approx(total, rel=1e-12, abs=1e-12)
    mirror.run(lambda: module.training)
    assert module.held.item() == pytest.approx(total, rel=1e-12, abs=1e-12)
    assert sum(on_replicas(mirror)) == pytest.approx(total, rel=1e-12, abs=1e-12)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64), min_size=1, max_size=5),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.integers(-(2**62), 2**62),
    st.integers(1, 50),
)
def test_shares_of_a_number_add_up_exactly(
    numbers: list[float], dtype: torch.dtype, whole: int, world_size: int
) -> None:
    value = torch.tensor(numbers, dtype=dtype)
    value = torch.where(torch.isfinite(value), value, torch.zeros_like(value))
    shares = [share_of(value, rank, world_size) for rank in range(world_size)]
    assert {share.dtype for share in shares} == {dtype}
    assert torch.equal(aggregate(shares, "sum"), value)
    assert all(torch.equal(share, shares[-1]) for share in shares[1:])
    shares = [share_of(torch.tensor(whole), rank, world_size) for rank in range(world_size)]
    assert aggregate(shares, "sum").item() == whole
    assert abs(shares[0].item() - shares[-1].item()) < world_size


def test_nan_infinity_complex_numbers_and_dtypes_are_kept() -> None:
    for number in (float("inf"), float("-inf"), float("nan")):
        shares = [share_of(torch.tensor(number), rank, 3) for rank in range(3)]
        torch.testing.assert_close(aggregate(shares, "sum"), torch.tensor(number), equal_nan=True)
    values = [torch.tensor(1 + 1j, dtype=torch.complex64), torch.tensor(2, dtype=torch.complex64)]
    found = {how: aggregate(values, how) for how in ("sum", "mean", "first")}
    assert {how: value.item() for how, value in found.items()} == {"sum": 3 + 1j, "mean": 1.5 + 0.5j, "first": 1 + 1j}
    assert {value.dtype for value in found.values()} == {torch.complex64}
    assert aggregate([torch.tensor(200, dtype=torch.uint8), torch.tensor(5, dtype=torch.uint8)], "sum").item() == 205
    tenth = torch.tensor([0.1], dtype=torch.float64)
    assert torch.equal(aggregate([tenth] * 3, "mean"), tenth)  # equal values stay exact
    assert wide(torch.tensor(1.0)).dtype is torch.float64
    assert wide(torch.tensor(1, dtype=torch.int8)).dtype is torch.int64


class Averaging(nn.Module):
    """Keeps an average and a count, and assigns them anew."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: float) -> float:
        self.mean = 0.5 * self.mean + x
        self.count = self.count + 1
        return self.mean.item()


@pytest.fixture
def averaging(mirror: Mirror) -> Averaging:
    with mirror.scope():
        return Averaging()


def test_statistics_assigned_by_a_step_read_as_their_mean_and_can_be_exported(
    mirror: Mirror, averaging: Averaging
) -> None:
    step = lambda rank: averaging(float(rank))  # noqa: E731
    for number, (values, mean) in enumerate([([0.0, 1.0], 0.5), ([0.0, 1.5], 0.75), ([0.0, 1.75], 0.875)], 1):
        assert mirror.run(step, rank_of(mirror)) == values
        assert (averaging.mean.item(), averaging.count.item()) == (mean, number)
        assert type(averaging.mean) is MirroredTensor
    mirror.run(step, rank_of(mirror))
    exported = mirror.replicas[1].export_buffers()
    assert [buffer.tolist() for buffer in exported] == [[1.875], 4]
    mirror.replicas[0].import_buffers(exported)
    assert averaging.mean.item() == 1.875
    mirror.driver.reset()
    assert mirror.run(step, rank_of(mirror)) == [0.9375, 1.9375]


def test_a_shared_buffer_replaced_in_one_module_stays_in_the_other(mirror: Mirror) -> None:
    with mirror.scope():
        first, second = Averaging(), Averaging()
        second.mean = first.mean
    mirror.run(lambda: (first(1.0), second.mean.item()))
    assert (first.mean.item(), second.mean.item()) == (1.0, 0.0)
