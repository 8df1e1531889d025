"""What an input worker does, without an actor around it."""

from __future__ import annotations

import functools
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from raydist.actors.version_check import Software, installed_packages
from raydist.actors.workers import worker as worker_module
from raydist.actors.workers.mapped_columns import StoredColumns
from raydist.actors.workers.worker import InputWorker, WorkerResult, unpack_result
from raydist.core.errors import FailedPreconditionError, RaydistError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, StageResult
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec, run_stage
from raydist.pipelines.run.iterator import DatasetIterator
from tests.pipelines.engine.toy_stages import block_of


class Seen(Executor):
    """Notes the first stage and block that an iterator submits."""

    window = 1

    def __init__(self) -> None:
        self.submitted: list[tuple[StageSpec, Block, tuple[int, ...]]] = []

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        self.submitted.append((spec, block, starts))
        raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing was started."""


def first_work(dataset: Dataset) -> tuple[bytes, Block, tuple[int, ...]]:
    seen = Seen()
    iterator = DatasetIterator(
        dataset._op, options=Options(), seed=0, epoch=0, convert=Block.rows, make_executor=lambda options: seen
    )
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    spec, block, starts = seen.submitted[0]
    return cloudpickle.dumps(spec), block, starts


def across(returned: tuple[WorkerResult, StoredColumns | None]) -> StageResult:
    answer, stored = returned
    assert stored is None  # these results are small
    return unpack_result(pickle.loads(pickle.dumps(answer)))


def test_a_stage_is_sent_once() -> None:
    spec, block, starts = first_work(Dataset.range(3).map(lambda x: x + 1))
    worker = InputWorker("worker-0")
    expected = run_stage(pickle.loads(spec), block, starts)
    for sent in (spec, None):
        result = across(worker.run(b"a", sent, block, starts))
        assert [item.rows() for item in result.items if isinstance(item, Block)] == [
            item.rows() for item in expected.items if isinstance(item, Block)
        ]
        assert result.inputs == expected.inputs
    worker.forget([b"a", b"unknown"])
    with pytest.raises(KeyError):
        across(worker.run(b"a", None, block, starts))


def test_functions_of_a_program_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "limit_memory", lambda limit: limit)
    monkeypatch.setattr(worker_module, "keep_freed_memory", lambda limit: True)
    spec, block, starts = first_work(Dataset.range(3).map(lambda x: (tmp_path / "ran").write_bytes(b"") + x))
    worker = InputWorker("worker-0")
    own = dict(installed_packages().versions)
    worker.hello(driver=Software(tuple({**own, "raydist": "0.0.9"}.items())))
    with pytest.raises(FailedPreconditionError, match=r"input worker worker-0 has raydist \S+, not 0\.0\.9\. Install"):
        across(worker.run(b"a", spec, block, starts))
    assert not (tmp_path / "ran").exists()


def test_an_elements_error_names_the_worker() -> None:
    def fail(x: Any) -> Any:
        raise LookupError("no such thing")

    spec, block, starts = first_work(Dataset.range(1).map(fail))
    (item,) = across(InputWorker("worker-7").run(b"a", spec, block, starts)).items
    assert isinstance(item, ElementError)
    assert isinstance(item.error, LookupError)
    assert item.error.__notes__ == ["In worker-7."]
    assert item.index == 0


def test_what_was_imported_is_not_looked_through_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, functools.partial(called.append, name))
    for name in ("limit_memory", "keep_freed_memory"):
        monkeypatch.setattr(worker_module, name, lambda limit: limit)
    spec, block, starts = first_work(Dataset.range(3).map(lambda x: x + 1))
    worker = InputWorker("worker-0")
    worker.run(b"z", spec, block, starts)
    assert called == []  # in a process of somebody else
    worker.forget([b"z"])
    worker.hello()
    for digest in (b"a", b"b"):
        worker.run(digest, spec, block, starts)
    worker.forget([b"a"])
    assert called == ["unfreeze", "freeze", "unfreeze"]


def test_leaving_the_process_is_an_error_of_the_element() -> None:
    def leave(x: Any) -> Any:
        return x if x != 1 else exit(3)

    spec, _, starts = first_work(Dataset.range(1).map(leave))
    result = across(InputWorker("worker-7").run(b"a", spec, block_of(Dataset.range(3)), starts))
    first, error, last = result.items
    assert isinstance(first, Block)
    assert isinstance(last, Block)
    assert (first.rows(), last.rows()) == ([0], [2])
    assert isinstance(error, ElementError)
    assert error.index == 1
    assert isinstance(error.error, RaydistError)
    assert "must not leave its process: map-1" in str(error.error)
    assert "SystemExit: 3" in str(error.error)


def test_a_stage_that_cannot_be_loaded_says_so_of_every_block() -> None:
    worker = InputWorker("worker-0")
    block = block_of(Dataset.range(1))
    for sent in (b"cnowhere\nnothing\n.", None):
        with pytest.raises(ModuleNotFoundError, match="nowhere"):
            across(worker.run(b"a", sent, block, (0,)))


def test_a_worker_knows_its_process_and_limits_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []
    monkeypatch.setattr(worker_module, "limit_memory", limits.append)
    assert InputWorker("worker-0", 5000).hello() == os.getpid()
    assert limits == [5000]
