"""Batches that are no plain stack of rows: refused, or shared by replicas as one device would see them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.distributed_dataset import distribute
from raydist.options import InputOptions
from tests.actors.readers.fakes import fake_side

MATRIX = np.arange(12.0).reshape(3, 4)


def test_a_dataset_that_was_never_batched_is_refused_at_once() -> None:
    rows = Dataset.from_tensor_slices(MATRIX)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(range(6)), 2)})
    for dataset in (
        rows,
        Dataset.from_tensor_slices({"x": MATRIX, "y": MATRIX}).shuffle(3).repeat(2).prefetch(1),
        Dataset.from_arrow(table).take(2),
        rows.global_shuffle(1).cache(),
        rows.batch(2).concatenate(rows),
        Dataset.zip(rows, rows.batch(1)),
        Dataset.sample_from_datasets([rows] * 2, seed=1),
        Dataset.range(4),
    ):
        with pytest.raises(InvalidArgumentError, match=r"Call \.batch\(global_batch_size\)"):
            rd.OneDeviceStrategy("cpu").distribute_dataset(dataset)
        with fake_side(2) as side, pytest.raises(InvalidArgumentError, match=r"Call \.batch\(global_batch_size\)"):
            distribute(dataset, side, InputOptions())


def test_what_a_function_may_have_batched_is_taken() -> None:
    rows = Dataset.from_tensor_slices(MATRIX)
    for dataset in (
        rows.map(lambda row: row),  # a function may return batches
        rows.map_batches(lambda rows: rows, 2),
        rows.window(2).flat_map(lambda window: window.batch(2)),
        Dataset.from_tensors(MATRIX),
        Dataset.from_generator(lambda: iter(MATRIX), output_signature=rd.TensorSpec((4,), "float64")),
        Dataset.from_torch([torch.zeros(4)]),
        rows.padded_batch(2),
        rows.batch(2).shuffle(2).unbatch(),
    ):
        assert rd.OneDeviceStrategy("cpu").distribute_dataset(dataset).cardinality() is not None


def test_leaves_of_different_lengths_are_an_error_of_the_iteration_on_one_device_too() -> None:
    both = Dataset.from_tensors({"nodes": torch.zeros(7, 1), "target": torch.zeros(2)})
    alone = rd.OneDeviceStrategy("cpu")
    for view in (alone.distribute_dataset(both), alone.distribute_datasets_from_function(lambda _: both)):
        with pytest.raises(InvalidArgumentError, match=r"'nodes': 7, 'target': 2.*rd\.Replicated"):
            next(iter(view))


def test_what_is_replicated_keeps_its_mark_in_functions_and_is_plain_for_users() -> None:
    weights = rd.Replicated([1.0, 2.0, 3.0])
    marked = Dataset.range(4).batch(2).map(lambda x: {"x": x, "w": weights})
    marked = marked.map(lambda batch: {**batch, "y": batch["x"]})
    first = next(iter(marked))
    assert first["w"].tolist() == [1.0, 2.0, 3.0]
    assert str(marked.element_spec["w"]) == "ReplicatedSpec(shape=(3,), dtype=float32)"
    with fake_side(2) as side:
        batches = list(distribute(marked, side, InputOptions(num_input_workers=0)))
    assert [part.tolist() for part in batches[0]["w"].values] == [[1.0, 2.0, 3.0]] * 2
    assert batches[0]["x"].rows == (1, 1)


def samples(size: int) -> Dataset:
    return Dataset.range(size).map(lambda x: {"n": x, "row": np.full(x % 4, x)})


def ragged(size: int, batch: int) -> Dataset:
    return samples(size).ragged_batch(batch)


def graphs(size: int, batch: int) -> Dataset:
    """Nodes of all graphs of a batch, the graph of each node, and one number a graph."""

    def joined(elements: list[Any]) -> Any:
        counts = torch.tensor([len(each["row"]) for each in elements])
        return {
            "n": torch.stack([each["n"] for each in elements]),
            "row": torch.cat([each["row"] for each in elements]),
            "graph": torch.repeat_interleave(torch.arange(len(elements)), counts),
        }

    return samples(size).batch(batch, collate=joined)


def numbers(value: Any) -> list[int]:
    return [int(x) for row in value for x in row] if isinstance(value, list) else [int(x) for x in value]


def require_whole_elements(step: Any) -> None:
    for count, part in zip(step["n"].rows, step["n"].values, strict=True):
        assert len(part) == count
    if "graph" in step:  # each replica counts its own graphs from 0
        for graph, n in zip(step["graph"].values, step["n"].values, strict=True):
            assert graph.tolist() == [k for k, x in enumerate(n.tolist()) for _ in range(x % 4)]


@settings(max_examples=30)
@given(
    make=st.sampled_from([ragged, graphs]),
    size=st.integers(1, 20),
    batch=st.integers(1, 7),
    replicas=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    rule=st.sampled_from(["per_batch", "balanced"]),
    data=st.data(),
)
def test_pieces_of_all_replicas_are_the_batch_by_element_and_resume_anywhere(
    make: Any, size: int, batch: int, replicas: tuple[int, int], rule: Any, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, -(-size // batch)))
    found: list[Any] = []
    state: Any = None
    for count, stop in zip(replicas, (at, None), strict=True):
        with fake_side(count) as side:
            iterator = iter(distribute(make(size, batch), side, InputOptions(split=rule, num_input_workers=0)))
            if state is not None:
                iterator.load_state_dict(state)
            found += itertools.islice(iterator, stop)
            state = iterator.state_dict()
    whole = list(range(size))
    assert [int(n) for step in found for part in step["n"].values for n in part] == whole
    rows = [numbers(part) for step in found for part in step["row"].values]
    assert [x for row in rows for x in row] == [x for x in whole for _ in range(x % 4)]
    for step in found:
        require_whole_elements(step)


class Detector(torch.nn.Module):
    """Takes lists, as models that find objects do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, images: list[torch.Tensor], targets: list[Any]) -> torch.Tensor:
        losses = [
            (self.inner(image.mean(dim=1)).sum() - target["boxes"].sum()) ** 2
            for image, target in zip(images, targets, strict=True)
        ]
        return torch.stack(losses).mean()


def pictures() -> Dataset:
    samples = [
        (np.random.default_rng(i).random((3, 4 + i % 3)), {"boxes": np.arange(2.0 * (i % 4)).reshape(-1, 2)})
        for i in range(9)
    ]
    return Dataset.from_torch(samples).batch(4, collate=lambda elements: tuple(zip(*elements, strict=True)))


@pytest.mark.ray
def test_a_model_of_lists_trains_on_replicas_as_on_one_device(two: rd.MirroredStrategy) -> None:
    def trained(strategy: rd.Strategy, inside: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = Detector()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(images: Any, targets: Any) -> None:
            assert isinstance(images, tuple)
            assert all(image.dtype == torch.float64 for image in images)
            optimizer.zero_grad()
            model(images, targets).backward()
            optimizer.step()

        def loop(batches: Any) -> None:
            for images, targets in batches:
                step(images, targets)

        view = strategy.distribute_dataset(pictures())
        if inside:
            strategy.run(loop, args=(iter(view),))
        else:
            for images, targets in view:
                strategy.run(step, args=(images, targets))
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = trained(rd.OneDeviceStrategy("cpu"), inside=False)
    for inside in (False, True):
        torch.testing.assert_close(trained(two, inside), expected, rtol=1e-9, atol=0)


@pytest.mark.ray
def test_marked_leaves_do_not_weigh_and_arrive_whole(two: rd.MirroredStrategy) -> None:
    with two.scope():
        net = torch.nn.Linear(1, 1, bias=False)

    def step(batch: Any, more: Any) -> tuple[float, int, int]:
        net.zero_grad()
        (net.weight.sum() * batch["target"]).mean().backward()
        assert net.weight.grad is not None
        return net.weight.grad.item(), len(batch["nodes"]), more["k"]

    def elements(_: rd.InputContext) -> Dataset:
        counts = ((1, 0.0), (9, 10.0))  # two graphs of one target each: both weigh the same
        return Dataset.from_torch(
            [{"nodes": rd.Replicated(torch.ones(n, 1)), "target": torch.tensor([t])} for n, t in counts]
        )

    (batch,) = two.distribute_datasets_from_function(elements)
    found = two.local_results(two.run(step, args=(batch, {"k": rd.Replicated(3)})))
    assert [tuple(each) for each in found] == [(5.0, 1, 3), (5.0, 9, 3)]
