from __future__ import annotations

from pathlib import Path

import pytest

import raydist as rd
from raydist.summary.recording import require_driver
from tests.summaries.reading import curves


def test_a_step_is_named_by_the_call_or_the_writer_or_is_the_global_one(tmp_path: Path) -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope(), rd.summary.create_file_writer(tmp_path) as writer:
        with writer.as_default(step=5):
            rd.summary.scalar("call", 1.0, step=9)
            rd.summary.scalar("writer", 1.0)
        with writer.as_default():
            rd.get_global_step().fill_(3)
            rd.summary.scalar("global", 1.0)
    found = curves(tmp_path)
    assert [found.scalars(name)[0][0] for name in ("call", "writer", "global")] == [9, 5, 3]


def test_the_global_step_is_that_of_the_step_that_calls(tmp_path: Path) -> None:
    strategy = rd.OneDeviceStrategy("cpu")

    def step() -> None:
        rd.summary.scalar("before", 1.0)
        rd.get_global_step().add_(1)
        rd.summary.scalar("after", 1.0)

    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        with strategy.scope():
            rd.get_global_step()
        for _ in range(2):
            strategy.run(step)
    assert [step for step, _ in curves(tmp_path).scalars("before")] == [0, 1]
    assert [step for step, _ in curves(tmp_path).scalars("after")] == [1, 2]


def test_without_anybody_who_counts_steps_are_0_and_that_is_said(tmp_path: Path) -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with rd.summary.create_file_writer(tmp_path) as writer:
        with writer.as_default():
            for value in range(10):
                strategy.run(lambda value: rd.summary.scalar("loss", value), args=(value,))
        with pytest.warns(UserWarning, match=r"must advance, but 'loss' was recorded 10 times at step 0"):
            writer.flush()
    assert curves(tmp_path).scalars("loss") == [(0, float(value)) for value in range(10)]


def test_some_things_are_for_the_driver() -> None:
    require_driver("it")
    with pytest.raises(rd.FailedPreconditionError, match="it is for the driver: this code runs inside of strategy.run"):
        rd.OneDeviceStrategy("cpu").run(require_driver, args=("it",))
