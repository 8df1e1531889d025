"""Distributed datasets over an input pipeline in this process: splitting, epochs, state, errors, function datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from raydist.core.values import InputContext, PerReplica
from raydist.dataset import Dataset
from raydist.distributed_dataset import LocalDistributedDataset, distribute, distribute_from_function
from raydist.options import AutoShardPolicy, InputOptions, Options
from raydist.pipelines.elements.spec import TensorSpec
from tests.actors.readers.fakes import fake_side

OPTIONS = InputOptions(num_input_workers=0)
EACH = InputOptions(per_replica=True, num_input_workers=0)


def lists(batch: PerReplica) -> list[Any]:
    return [value.tolist() for value in batch.values]


SIDES = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (6, 3)])  # replicas and workers


@settings(max_examples=20)
@given(size=st.integers(0, 25), batch=st.integers(1, 9), begun=SIDES, later=SIDES, data=st.data())
def test_any_step_resumes_on_any_number_of_replicas_and_workers_and_on_one_device(
    size: int, batch: int, begun: tuple[int, int], later: tuple[int, int], data: st.DataObject
) -> None:
    def flat(batches: Any) -> list[list[int]]:
        return [[row for part in lists(one) for row in part] for one in batches]

    dataset = Dataset.range(size).shuffle(5, seed=3).map(lambda x, *, rng: x * 100 + rng.integers(100))
    dataset = dataset.batch(batch).with_options(Options(seed=7))
    whole = [rows.tolist() for rows in dataset]
    stop = data.draw(st.integers(0, len(whole)))
    with fake_side(begun[0], num_workers=begun[1]) as side, fake_side(later[0], num_workers=later[1]) as other_side:
        iterator = iter(distribute(dataset, side, OPTIONS))
        head = flat(next(iterator) for _ in range(stop))
        state = json.loads(json.dumps(iterator.state_dict()))
        assert len(json.dumps(state)) < 10_000
        resumed = iter(distribute(dataset, other_side, OPTIONS))
        resumed.load_state_dict(state)
        assert head + flat(resumed) == whole
        plain = iter(LocalDistributedDataset(dataset))
        plain.load_state_dict(state)
        assert head + [rows.tolist() for rows in plain] == whole


def test_states_at_the_end_and_at_the_start_and_the_ends_of_an_iterator() -> None:
    with fake_side(2) as side:
        dataset = distribute(Dataset.range(2).batch(2), side, OPTIONS)
        iterator = iter(dataset)
        start = iterator.state_dict()
        assert lists(iterator.get_next_as_optional().get_value()) == [[0], [1]]
        assert not iterator.get_next_as_optional().has_value()
        with pytest.raises(OutOfRangeError):
            iterator.get_next()
        with pytest.raises(StopIteration):
            next(iterator)
        again = iter(dataset)
        again.load_state_dict(iterator.state_dict())
        assert list(again) == []
        again.load_state_dict(start)
        assert lists(next(again)) == [[0], [1]]
        again.close()
        again.close()
        with pytest.raises(FailedPreconditionError, match="closed"):
            next(again)


def test_empty_pieces_have_dtype_and_shape_and_stand_ins() -> None:
    images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    dataset = Dataset.from_tensor_slices({"image": images, "name": [b"a", b"b", b"c"]}).batch(3)
    with fake_side(4) as side:
        (batch,) = distribute(dataset, side, OPTIONS)
        last = batch["image"].values[3]
        assert (last.dtype, tuple(last.shape)) == (torch.uint8, (0, 2, 2))
        assert batch["image"].rows == (1, 1, 1, 0)
        assert batch["name"].values[1].tolist() == [b"b"]
        assert batch["name"].values[3].shape == (0,)
        part = batch["name"].part_on(3, padding=True)
        assert part.ref.leaf(part.leaf_index, part.place).tolist() == [b"a", b"b"]
        for rank, rows in ((3, []), (0, [b"a"])):
            part = batch["name"].part_on(rank, padding=rank == 0)
            assert part.ref.leaf(part.leaf_index, part.place).tolist() == rows


def divide(x: Any) -> Any:
    if x == 3:
        raise ZeroDivisionError("three")
    return x


def test_an_error_stands_in_its_place_and_iteration_goes_on() -> None:
    with fake_side(2) as side:
        iterator = iter(distribute(Dataset.range(6).map(divide).batch(2), side, OPTIONS))
        assert lists(next(iterator)) == [[0], [1]]
        with pytest.raises(ZeroDivisionError, match="three") as caught:
            next(iterator)
        notes = " ".join(caught.value.__notes__)
        assert "map-1" in notes
        assert "element 3" in notes
        state = iterator.state_dict()
        assert lists(next(iterator)) == [[4], [5]]
        iterator.load_state_dict(state)
        assert lists(next(iterator)) == [[4], [5]]


def test_specs_and_cardinality() -> None:
    with fake_side(2) as side:
        dynamic = distribute(Dataset.range(10).batch(4), side, OPTIONS)
        static = distribute(Dataset.range(10).batch(4, drop_remainder=True), side, OPTIONS)
        odd = distribute(Dataset.range(10).batch(5, drop_remainder=True), side, OPTIONS)
        assert dynamic.element_spec == TensorSpec((None,), np.int64)
        assert static.element_spec == TensorSpec((2,), np.int64)
        assert odd.element_spec == iter(odd).element_spec == TensorSpec((None,), np.int64)
        assert (dynamic.cardinality(), static.cardinality()) == (3, 2)
        assert dynamic.options is OPTIONS
        assert not hasattr(dynamic, "map")


def always(dataset: Dataset) -> Callable[[Any], Dataset]:
    return lambda context: dataset


def test_elements_of_a_function_are_dealt_in_turn() -> None:
    with fake_side(2) as side:
        for dataset, steps in (
            (Dataset.range(6).batch(2), [[[0, 1], [2, 3]], [[4, 5], []]]),
            (Dataset.range(3), [[0, 1], [2, []]]),
        ):
            dealt = distribute_from_function(always(dataset), side, OPTIONS)
            assert [lists(batch) for batch in dealt] == steps


def test_a_function_is_told_for_whom_it_builds() -> None:
    seen: list[InputContext] = []

    def make(context: InputContext) -> Dataset:
        seen.append(context)
        return Dataset.range(2).batch(context.get_per_replica_batch_size(2))

    with fake_side(2) as side:
        distribute_from_function(make, side, OPTIONS)
        distribute_from_function(make, side, EACH)
    assert seen == [InputContext(1, 0, 2), InputContext(2, 0, 2), InputContext(2, 1, 2)]


def test_one_pipeline_per_replica_goes_on_until_none_has_rows() -> None:
    def make(context: InputContext) -> Dataset:
        return Dataset.range(100 * context.input_pipeline_id, 101 * context.input_pipeline_id + 2)

    with fake_side(2) as side:
        iterator = iter(distribute_from_function(make, side, EACH))
        assert [lists(next(iterator)) for _ in range(2)] == [[0, 100], [1, 101]]
        state = iterator.state_dict()
        assert [lists(batch) for batch in iterator] == [[[], 102]]
        iterator.load_state_dict(state)
        assert [lists(batch) for batch in iterator] == [[[], 102]]


def test_what_may_end_earlier_on_some_replicas_has_no_fixed_length() -> None:
    pairs = Dataset.range(8).batch(2, drop_remainder=True)
    files_off = pairs.with_options(Options(auto_shard_policy=AutoShardPolicy.OFF))
    with fake_side(2) as side, fake_side(2, num_workers=2) as nodes, fake_side(1) as alone:
        assert distribute_from_function(lambda context: pairs, side, OPTIONS).element_spec.shape == (None,)
        assert distribute_from_function(lambda context: pairs, alone, OPTIONS).element_spec.shape == (2,)
        assert distribute(files_off, nodes, OPTIONS).element_spec.shape == (None,)
        assert distribute(files_off, side, OPTIONS).element_spec.shape == (1,)


def test_states_of_function_datasets_belong_to_their_number_of_pipelines() -> None:
    def make(context: InputContext) -> Dataset:
        return Dataset.range(10 * context.input_pipeline_id, 10 * context.input_pipeline_id + 6)

    with fake_side(4, num_workers=2) as two, fake_side(4) as one, fake_side(2) as fewer:
        iterator = iter(distribute_from_function(make, two, EACH))
        next(iterator)
        state = json.loads(json.dumps(iterator.state_dict()))
        moved = iter(distribute_from_function(make, one, EACH))  # as many pipelines, on one node
        moved.load_state_dict(state)
        assert [lists(batch) for batch in moved] == [lists(batch) for batch in iterator]
        other = iter(distribute_from_function(make, fewer, EACH))
        other.load_state_dict(state)
        with pytest.raises(InvalidArgumentError, match="it is of 4, and there are 2 now"):
            next(other)


def test_an_error_of_one_worker_loses_nothing_of_the_others() -> None:
    def make(context: InputContext) -> Dataset:
        first = 10 * context.input_pipeline_id
        return Dataset.range(first, first + 5).map(divide)

    with fake_side(2, num_workers=2) as side:
        iterator = iter(distribute_from_function(make, side, OPTIONS))
        assert [lists(next(iterator)) for _ in range(3)] == [[0, 10], [1, 11], [2, 12]]
        with pytest.raises(ZeroDivisionError, match="three") as caught:
            next(iterator)
        assert "worker 0 of 2, step 3" in " ".join(caught.value.__notes__)
        state = iterator.state_dict()
        rest = [[4, 13], [[], 14]]
        assert [lists(batch) for batch in iterator] == rest
        iterator.load_state_dict(state)
        assert [lists(batch) for batch in iterator] == rest
