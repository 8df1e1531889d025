"""Elements become steps of replicas: how global batches are cut, dealt and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import LEAF, flatten
from raydist.dataset import Dataset
from raydist.pipelines.elements.collated import CollatedLeaf
from raydist.pipelines.elements.object_leaves import ListLeaf, WholeLeaf
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.split import Cut, SplitRule, balanced, cut_batch, deal, per_batch
from raydist.pipelines.run.steps import DealtElements, Element, GlobalBatches, StepSource, WorkerBatches, element_views
from tests.pipelines.tables import check_refused

PAIR = flatten((0, 1))[1]
rows_counts = st.integers(0, 40)
replica_counts = st.integers(1, 7)
rules: st.SearchStrategy[SplitRule] = st.sampled_from(["per_batch", "balanced"])


def test_per_batch_follows_the_table() -> None:
    table = {(4, 2): (2, 2), (2, 2): (1, 1), (4, 5): (1, 1, 1, 1, 0), (4, 3): (2, 2, 0), (1, 2): (1, 0), (0, 2): (0, 0)}
    assert {(rows, replicas): per_batch(rows, replicas) for rows, replicas in table} == table


@given(rows=rows_counts, replicas=replica_counts)
def test_balanced_gives_every_replica_the_same_over_a_round(rows: int, replicas: int) -> None:
    steps = [balanced(rows, replicas, step) for step in range(replicas)]
    assert all(sum(sizes) == rows and max(sizes) - min(sizes) <= 1 for sizes in steps)
    assert set(np.sum(steps, axis=0).tolist()) == {rows}


@given(rows=rows_counts, replicas=replica_counts, rule=rules, step=st.integers(0, 9))
def test_pieces_put_together_are_the_batch(rows: int, replicas: int, rule: SplitRule, step: int) -> None:
    batch = [np.arange(rows * 3).reshape(rows, 3), np.array([b"x"] * rows, dtype=object)]
    cuts, _ = cut_batch(batch, num_replicas=replicas, rule=rule, step=step, structure=PAIR)
    assert len(cuts) == replicas
    for index, leaf in enumerate(batch):
        joined = np.concatenate([cut.columns[index] for cut in cuts])
        assert joined.dtype == leaf.dtype
        np.testing.assert_array_equal(joined, leaf)
    for cut in cuts:
        assert cut.num_rows == len(cut.columns[0])
        if cut.num_rows or not rows:
            assert rows == 0 or cut.padding is None
        else:  # a replica without rows has up to two rows to stand in
            assert cut.padding is not None
            np.testing.assert_array_equal(cut.padding[0], batch[0][:2])


def test_what_cannot_be_cut() -> None:
    def cut(*batch: Any) -> object:
        structure = PAIR if len(batch) == 2 else LEAF
        return cut_batch(batch, num_replicas=2, rule="per_batch", step=0, structure=structure)

    lengths = np.arange(4), np.arange(6)
    leaves: list[Any] = [np.int64(3), b"text", "text", np.array(1.0)]
    cases: list[tuple[Callable[[], object], str]] = [
        (partial(cut, *lengths), r"equally many rows.*'0': 4, '1': 6.*rd\.Replicated.*collate"),
        (lambda: deal([lengths], PAIR), "equally many rows"),
        (lambda: cut(WholeLeaf(np.arange(4))), "beside those marked with rd.Replicated"),
        (lambda: deal([[np.arange(3), np.int64(7)], None], PAIR), "got a scalar '1'"),
        *((partial(cut, np.arange(3), leaf), r"'1'.*Call the `batch` method") for leaf in leaves),
    ]
    check_refused(InvalidArgumentError, cases)


def test_what_is_replicated_goes_whole_to_every_replica() -> None:
    batch = [np.arange(3), WholeLeaf(np.arange(4))]
    cuts, _ = cut_batch(batch, num_replicas=4, rule="per_batch", step=0, structure=PAIR)
    assert [cut.num_rows for cut in cuts] == [1, 1, 1, 0]
    assert all(cut.columns[1].item().value.tolist() == [0, 1, 2, 3] for cut in cuts)
    assert cuts[3].padding is not None
    assert cuts[3].padding[0].tolist() == [0, 1]
    assert cuts[3].padding[1].item().value.tolist() == [0, 1, 2, 3]


def test_deal_gives_no_rows_to_replicas_without_an_element() -> None:
    cuts, _ = deal([None, [np.ones((3, 2), np.float32)], None])
    assert [cut.num_rows for cut in cuts] == [0, 3, 0]
    assert [cut.columns[0].shape for cut in cuts] == [(0, 2), (3, 2), (0, 2)]
    assert cuts[2].columns[0].dtype == np.float32
    assert cuts[0].padding is not None
    assert cuts[0].padding[0].shape == (2, 2)
    scalars, _ = deal([[np.int64(7), b"a\0"], None], PAIR)
    assert [cut.num_rows for cut in scalars] == [1, 0]
    assert scalars[0].columns[1][()] == b"a\0"
    assert [column.shape for column in scalars[1].columns] == [(0,), (0,)]


def boxes(cut: Cut) -> list[Any]:
    return [column.item().value for column in cut.columns]


@given(rows=st.integers(1, 20), replicas=replica_counts, rule=rules, step=st.integers(0, 9))
def test_lists_and_collated_batches_are_cut_by_element(rows: int, replicas: int, rule: SplitRule, step: int) -> None:
    arrays = [np.full(number % 3, number) for number in range(rows)]
    lists = ListLeaf(arrays, TensorSpec((None,), np.int64))
    elements = block_of_rows([{"x": array} for array in arrays])
    collated = CollatedLeaf(
        (elements,), lambda them: {"values": torch.cat([each["x"] for each in them]), "n": len(them)}
    )
    cuts, structure = cut_batch([lists, collated], num_replicas=replicas, rule=rule, step=step, structure=PAIR)
    assert structure.paths() == ["0", "1.n", "1.values"]
    pieces = [boxes(cut) for cut in cuts]
    assert [len(piece[0]) for piece in pieces] == [cut.num_rows for cut in cuts]
    assert [array.tolist() for piece in pieces for array in piece[0]] == [array.tolist() for array in arrays]
    assert [piece[1] for piece in pieces if piece[0]] == [cut.num_rows for cut in cuts if cut.num_rows]
    assert np.concatenate([piece[2] for piece in pieces]).tolist() == np.concatenate(arrays).tolist()
    for cut in cuts:
        if cut.num_rows == 0:
            assert cut.padding is not None
            assert len(cut.padding[0].item().value) == cut.padding[1].item().value == min(rows, 2)


def test_what_a_collate_function_returns_is_a_nest_as_far_as_replicas_agree() -> None:
    elements = block_of_rows([(number, str(number)) for number in range(3)])
    leaf = CollatedLeaf((elements,), lambda them: tuple(zip(*them, strict=True)))
    cuts, structure = cut_batch([leaf], num_replicas=2, rule="per_batch", step=0)
    assert str(structure) == "('*', '*')"
    assert boxes(cuts[1]) == [(2,), ("2",)]
    whole = CollatedLeaf((elements,), tuple)
    assert str(cut_batch([whole], num_replicas=2, rule="per_batch", step=0)[1]) == "*"


def iterator(dataset: Dataset) -> DatasetIterator[Element]:
    return DatasetIterator(dataset._op, options=dataset.options(), seed=0, epoch=0, convert=element_views)


def drain(source: StepSource) -> list[list[Any]]:
    steps = []
    while True:
        try:
            steps.append(lists(source.next_step()))
        except StopIteration:
            return steps


def lists(cuts: tuple[Cut, ...]) -> list[Any]:
    return [cut.columns[0].tolist() for cut in cuts]


def test_global_batches_are_cut_and_elements_are_dealt() -> None:
    cut = GlobalBatches(iterator(Dataset.range(6).batch(4)), 2, "per_batch")
    assert drain(cut) == [[[0, 1], [2, 3]], [[4], [5]]]
    assert drain(DealtElements([iterator(Dataset.range(3))], 2)) == [[0, 1], [2, []]]
    several = [iterator(Dataset.range(1)), iterator(Dataset.range(5, 7))]
    assert drain(DealtElements(several, 2)) == [[0, 5], [[], 6]]
    two, three = (DealtElements([iterator(Dataset.range(8)) for _ in range(count)], count) for count in (2, 3))
    with pytest.raises(InvalidArgumentError, match="it is of 2, and there are 3 now"):
        three.load_state_dict(two.state_dict())
    with pytest.raises(InvalidArgumentError, match="the state must be a dict"):
        three.load_state_dict([])  # type: ignore[arg-type]  # a user's mistake


def test_the_index_of_a_step_counts_errors_and_survives_a_state() -> None:
    def divide(x: Any) -> Any:
        if x == 0:
            raise ZeroDivisionError
        return x

    dataset = Dataset.range(6).map(divide).batch(2)
    source = GlobalBatches(iterator(dataset), 4, "balanced")
    with pytest.raises(ZeroDivisionError):
        source.next_step()
    resumed = GlobalBatches(iterator(dataset), 4, "balanced")
    resumed.load_state_dict(source.state_dict())
    assert resumed.step == 1
    assert drain(resumed) == drain(source) == [[[], [], [2], [3]], [[4], [5], [], []]]


def source(dataset: Dataset, replicas: int, pieces: int, rule: SplitRule = "per_batch") -> WorkerBatches:
    return WorkerBatches(iterator(dataset), replicas, pieces, rule)


def test_a_batch_lasts_for_as_many_steps_as_there_are_workers() -> None:
    assert drain(source(Dataset.range(6).batch(4), 1, 2)) == [[[0, 1]], [[2, 3]], [[4]], [[5]]]
    assert drain(source(Dataset.range(7).batch(7), 2, 4)) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert drain(source(Dataset.range(5).batch(4), 2, 2)) == [[[0, 1], [2, 3]], [[4], []]]
    balanced = source(Dataset.range(6).batch(3), 1, 2, "balanced")
    assert drain(balanced) == [[[0, 1]], [[2]], [[3]], [[4, 5]]], "it goes by the number of the batch"
    made = source(Dataset.range(1).batch(4), 1, 3)
    steps = [made.next_step()[0] for _ in range(3)]
    assert [step.num_rows for step in steps] == [1, 0, 0]
    assert [step.padding and step.padding[0].tolist() for step in steps] == [None, [0], [0]]


def test_every_step_resumes() -> None:
    dataset = Dataset.range(20).map(lambda x: 1 // (int(x) - 9)).batch(7)

    def next_of(steps: WorkerBatches) -> Any:
        try:
            return lists(steps.next_step())
        except ZeroDivisionError:
            return "error"
        except StopIteration:
            return None

    made = source(dataset, 1, 3)
    states, seen = [made.state_dict()], []
    while (found := next_of(made)) is not None:
        seen.append(found)
        states.append(made.state_dict())
    assert seen.count("error") == 1
    for start, state in enumerate(states):
        resumed = source(dataset, 1, 3)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        assert resumed.step == start
        assert list(iter(partial(next_of, resumed), None)) == seen[start:]


def test_lists_of_tensors_that_are_left_are_cut_anew() -> None:
    lists = Dataset.range(6).map(lambda x: np.full(x, x)).ragged_batch(6)
    made = source(lists, 1, 3)
    made.next_step()
    other = source(lists, 1, 2)
    other.load_state_dict(made.state_dict())
    left = [other.next_step()[0] for _ in range(2)]
    assert [[len(array) for array in cut.columns[0].item().value] for cut in left] == [[2, 3], [4, 5]]


def test_states_that_are_none() -> None:
    made = source(Dataset.range(4).batch(2), 1, 2)
    wrong: list[Any] = [[[3, 2]], [[1, 0]], [[1, 1 << 40]], [[-1, 2]], [[1]], 5, [["a", "b"]]]
    states = [{**made.state_dict(), "dealt": dealt} for dealt in wrong]
    check_refused(InvalidArgumentError, [(partial(made.load_state_dict, state), "") for state in states])
