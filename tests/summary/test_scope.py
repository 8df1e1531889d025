from __future__ import annotations

from pathlib import Path

import pytest

import raydist as rd
from tests.summaries.reading import curves


def test_a_condition_is_asked_at_each_call(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        for step in range(5):
            with rd.summary.record_if(lambda: step % 2 == 0):  # noqa: B023  # it is asked inside
                assert rd.summary.scalar("even", 1.0, step=step) == (step % 2 == 0)
        rd.summary.flush()
        assert [step for step, _ in curves(tmp_path).scalars("even")] == [0, 2, 4]


def test_a_step_flushes_nothing(tmp_path: Path) -> None:
    wrong = pytest.raises(rd.FailedPreconditionError, match="rd.summary.flush is for the driver")
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(), wrong:
        rd.OneDeviceStrategy("cpu").run(rd.summary.flush)
