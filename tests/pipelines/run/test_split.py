"""Property tests of how a global batch is cut, and the tables of the contract."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.errors import InvalidArgumentError
from raydist.pipelines.run.split import Cut, SplitRule, balanced, cut_batch, deal, per_batch

rows_counts = st.integers(0, 40)
replica_counts = st.integers(1, 7)
rules: st.SearchStrategy[SplitRule] = st.sampled_from(["per_batch", "balanced"])


@pytest.mark.parametrize(
    ("rows", "replicas", "sizes"),
    [
        (4, 2, (2, 2)),
        (2, 2, (1, 1)),
        (4, 5, (1, 1, 1, 1, 0)),
        (4, 3, (2, 2, 0)),
        (1, 2, (1, 0)),
        (0, 2, (0, 0)),
    ],
)
def test_per_batch_follows_the_table(rows: int, replicas: int, sizes: tuple[int, ...]) -> None:
    assert per_batch(rows, replicas) == sizes


@given(rows=rows_counts, replicas=replica_counts, step=st.integers(0, 1000))
def test_balanced_sizes_differ_by_one_and_add_up(rows: int, replicas: int, step: int) -> None:
    sizes = balanced(rows, replicas, step)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1


@given(rows=rows_counts, replicas=replica_counts)
def test_balanced_gives_every_replica_the_same_over_a_round(rows: int, replicas: int) -> None:
    totals = np.sum([balanced(rows, replicas, step) for step in range(replicas)], axis=0)
    assert set(totals.tolist()) == {rows}


@given(rows=rows_counts, replicas=replica_counts, rule=rules, step=st.integers(0, 9))
def test_pieces_put_together_are_the_batch(rows: int, replicas: int, rule: SplitRule, step: int) -> None:
    batch = [np.arange(rows * 3).reshape(rows, 3), np.array([b"x"] * rows, dtype=object)]
    cuts = cut_batch(batch, num_replicas=replicas, rule=rule, step=step)
    assert len(cuts) == replicas
    for index, leaf in enumerate(batch):
        joined = np.concatenate([cut.columns[index] for cut in cuts])
        assert joined.dtype == leaf.dtype
        np.testing.assert_array_equal(joined, leaf)
    assert [cut.num_rows for cut in cuts] == [len(cut.columns[0]) for cut in cuts]


@given(rows=st.integers(1, 40), replicas=replica_counts, rule=rules)
def test_a_replica_without_rows_has_up_to_two_rows_to_stand_in(rows: int, replicas: int, rule: SplitRule) -> None:
    batch = np.arange(rows, dtype=np.float32)
    for cut in cut_batch([batch], num_replicas=replicas, rule=rule, step=0):
        if cut.num_rows:
            assert cut.stand_in is None
        else:
            assert cut.stand_in is not None
            np.testing.assert_array_equal(cut.stand_in[0], batch[:2])


def test_pieces_are_views() -> None:
    batch = np.arange(8)
    assert all(
        np.shares_memory(cut.columns[0], batch) for cut in cut_batch([batch], num_replicas=2, rule="per_batch", step=0)
    )


def test_an_empty_batch_has_nothing_to_stand_in() -> None:
    cuts = cut_batch([np.empty((0, 3), np.float32)], num_replicas=2, rule="per_batch", step=0)
    assert [cut.stand_in for cut in cuts] == [None, None]
    assert [cut.columns[0].shape for cut in cuts] == [(0, 3), (0, 3)]


def test_leaves_of_other_lengths_are_cut_on_their_own() -> None:
    cuts = cut_batch([np.arange(4), np.arange(6)], num_replicas=2, rule="per_batch", step=0)
    assert [[column.tolist() for column in cut.columns] for cut in cuts] == [[[0, 1], [0, 1, 2]], [[2, 3], [3, 4, 5]]]


@pytest.mark.parametrize("leaf", [np.int64(3), b"text", "text", np.array(1.0)])
def test_an_unbatched_element_says_to_call_batch(leaf: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'y'.*Call the `batch` method"):
        cut_batch([np.arange(3), leaf], num_replicas=2, rule="per_batch", step=0, paths=["x", "y"])


def lists(cuts: tuple[Cut, ...]) -> list[list[object]]:
    return [cut.columns[0].tolist() for cut in cuts]


def test_deal_gives_each_replica_one_element() -> None:
    cuts = deal([[np.arange(2)], [np.arange(3)]])
    assert lists(cuts) == [[0, 1], [0, 1, 2]]
    assert [cut.num_rows for cut in cuts] == [2, 3]


def test_deal_gives_no_rows_to_replicas_without_an_element() -> None:
    cuts = deal([None, [np.ones((3, 2), np.float32)], None])
    assert [cut.num_rows for cut in cuts] == [0, 3, 0]
    assert [cut.columns[0].shape for cut in cuts] == [(0, 2), (3, 2), (0, 2)]
    assert cuts[2].columns[0].dtype == np.float32
    assert cuts[0].stand_in is not None
    assert cuts[0].stand_in[0].shape == (2, 2)


def test_deal_takes_scalars() -> None:
    cuts = deal([[np.int64(7), b"a\0"], None])
    assert [cut.num_rows for cut in cuts] == [1, 0]
    assert cuts[0].columns[1][()] == b"a\0"
    assert [column.shape for column in cuts[1].columns] == [(0,), (0,)]
