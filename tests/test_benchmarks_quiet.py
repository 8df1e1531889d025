"""Waiting for a quiet machine."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.quiet import await_quiet, stolen_share


def stats(*busy_ticks: int) -> Iterator[str]:
    return (f"cpu  {ticks} 0 0 777 0 0 0 0 0 0\ncpu0 ...\n" for ticks in busy_ticks)


def test_waits_until_what_others_do_is_done() -> None:
    read, slept = stats(0, 40, 42, 80, *range(80, 120, 2)), list[float]()
    assert await_quiet(5.0, read=lambda: next(read), sleep=slept.append)
    assert len(slept) == 9  # once it was quiet for a moment only


def test_gives_up_after_its_limit() -> None:
    read, slept = stats(*range(0, 1000, 40)), list[float]()
    assert not await_quiet(1.0, read=lambda: next(read), sleep=slept.append)
    assert len(slept) == 5


def test_tells_what_other_machines_were_given() -> None:
    def stat(user: int, idle: int, stolen: int) -> str:
        return f"cpu  {user} 0 0 {idle} 0 0 0 {stolen} 0 0\ncpu0 ...\n"

    assert stolen_share(stat(100, 100, 7), stat(160, 900, 27)) == 0.25
    assert stolen_share(stat(100, 100, 7), stat(100, 900, 7)) == 0.0
