from __future__ import annotations

import pytest

import raydist as rd
from raydist.training.callbacks.callback_list import BatchLogs
from tests.training.toys import Recorder, compiled, regression, small_net


def test_batch_logs_are_read_once_and_only_if_looked_at() -> None:
    reads: list[int] = []

    def read() -> dict[str, float]:
        reads.append(1)
        return {"loss": 0.5}

    logs = BatchLogs(read)
    assert logs or {}
    assert not reads
    assert (logs["loss"], dict(logs), len(logs), logs.get("accuracy")) == (0.5, {"loss": 0.5}, 1, None)
    assert len(reads) == 1
    logs.seal()
    assert logs["loss"] == 0.5


def test_unread_batch_logs_can_not_be_read_after_their_hook() -> None:
    logs = BatchLogs(lambda: {"loss": 0.5})
    logs.seal()
    with pytest.raises(rd.FailedPreconditionError, match=r"must be read in its hook.*dict\(logs\)"):
        logs["loss"]


def test_a_class_is_no_callback() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="instances of raydist.Callback.*Was a class passed"):
        compiled(small_net()).fit(regression(4, 4), callbacks=[Recorder], verbose=False)  # type: ignore[list-item]
