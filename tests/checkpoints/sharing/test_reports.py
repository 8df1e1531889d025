"""What became of saves is told by whoever wrote, for the last few."""

from __future__ import annotations

import threading

from raydist.checkpoints.sharing.reports import SaveReports
from raydist.checkpoints.sharing.shares import Share


def test_it_tells_of_each_save_once_it_is_known() -> None:
    reports, go = SaveReports(), threading.Event()

    def write() -> Share:
        go.wait(10)
        return Share({}, copy_s=2.0)

    def fail() -> Share:
        raise OSError("disk full")

    reports.write("slow", write)
    reports.write("bad", fail)
    assert reports.of("slow") is None
    go.set()
    reports.close(10.0)
    assert reports.of("slow") == Share({}, copy_s=2.0)
    assert str(reports.of("bad")) == "disk full"
    assert reports.of("another") is None


def test_it_forgets_the_oldest() -> None:
    reports = SaveReports()
    for number in range(9):
        reports.tell(str(number), Share({}))
    assert [number for number in range(9) if reports.of(str(number)) is not None] == [5, 6, 7, 8]
