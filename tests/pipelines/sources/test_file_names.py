from __future__ import annotations

from pathlib import Path

import pytest

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.run.plan import open_iterator
from raydist.pipelines.sources.record_files import FileNames, names_op


def opened(op: DatasetOp) -> FileNames:
    return FileNames(open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor()))


def failing_names() -> DatasetOp:
    """x1, an error, x3."""
    return Dataset.from_tensor_slices([1, 0, 3]).map(lambda x: f"x{x}" if x else {}[x])._op


def test_takes_names_one_by_one() -> None:
    names = opened(names_op(["a", b"b", Path("c")]))
    assert [names.take() for _ in range(3)] == ["a", "b", "c"]
    assert names.num_taken == 3
    with pytest.raises(StopIteration):
        names.take()
    assert names.num_taken == 3
    names.close()


def test_an_error_counts_as_a_name() -> None:
    names = opened(failing_names())
    assert names.take() == "x1"
    with pytest.raises(KeyError):
        names.take()
    assert names.num_taken == 2
    assert names.take() == "x3"
    names.close()


def test_retakes_the_wanted_names() -> None:
    names = opened(failing_names())
    assert names.retake(2, [0]) == {0: "x1"}
    assert names.num_taken == 2
    assert names.take() == "x3"
    assert opened(names_op("x")).retake(5, [0, 4]) == {0: "x"}  # fewer names than there were
