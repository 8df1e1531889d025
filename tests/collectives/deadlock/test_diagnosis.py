"""Who waits for whom, also by a model: small programs of ranks that run until none can go on."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from raydist.collectives.deadlock import RankStatus, diagnose


def waits(group: str, number: int, *, step: int = 3, calls: dict[str, int] | None = None) -> RankStatus:
    counted = {group: number + 1} | (calls or {})
    return RankStatus(7, step, True, counted, group, number, "all_reduce", 1)


def works(step: int = 3, **calls: int) -> RankStatus:
    return RankStatus(7, step, True, calls, look=1)


def ended(step: int = 3, **calls: int) -> RankStatus:
    return RankStatus(7, step, False, calls, look=1)


def verdict(*statuses: RankStatus) -> str | None:
    """Two looks between which nobody moved."""
    return diagnose(dict(enumerate(statuses)), {rank: replace(it, look=2) for rank, it in enumerate(statuses)})


def test_a_rank_that_has_left_is_waited_for_in_vain() -> None:
    assert verdict(waits("g", 1), ended(3, g=1)) is not None
    assert verdict(waits("g", 1), ended(4, g=1)) is not None
    assert verdict(waits("g", 1), works(4, g=1)) is not None
    assert verdict(waits("g", 1), waits("g", 1), ended(3, g=1)) is not None


def test_a_rank_that_may_still_come_is_waited_for() -> None:
    assert verdict(waits("g", 1), works(3, g=1)) is None
    assert verdict(waits("g", 1), ended(2, g=1)) is None  # its next step has not begun yet
    assert verdict(waits("g", 1), works(2, g=1)) is None
    assert verdict(waits("g", 1), waits("g", 1), works(3, g=1)) is None


def test_who_is_there_is_not_waited_for() -> None:
    assert verdict(waits("g", 1), ended(3, g=2)) is None  # its data are on their way
    assert verdict(waits("g", 1), waits("g", 1)) is None


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    assert verdict(waits("a", 0, calls={"b": 0}), waits("b", 0, calls={"a": 0})) is not None
    assert verdict(waits("a", 0), waits("b", 0, calls={"a": 1})) is None
    around = [
        waits("a", 0, calls={"c": 1}),
        waits("b", 0, calls={"a": 0, "c": 1}),
        waits("c", 0, calls={"a": 1, "b": 0}),
    ]
    assert verdict(*around) is not None


def test_nobody_is_judged_by_one_look_or_by_an_old_one() -> None:
    now = {0: waits("g", 1), 1: ended(3, g=1)}
    later = {rank: replace(status, look=2) for rank, status in now.items()}
    assert diagnose({}, now) is None
    assert diagnose(now, later) is not None
    assert diagnose(now, {**later, 1: now[1]}) is None  # it did not answer again
    assert diagnose(now, {**later, 1: replace(later[1], events=8)}) is None  # it has moved
    assert diagnose(now, {0: later[0]}) is None


def test_the_one_that_differs_is_named() -> None:
    said = verdict(waits("g", 1), ended(3, g=1), waits("g", 1))
    assert said is not None
    assert said.startswith("rank 0 waits in all_reduce (g, call 1) in step 3; rank 1 has ended step 3; ")
    assert said.endswith("; rank 1 differs from the others")
    both = verdict(waits("g", 1), ended(3, g=1))
    assert both is not None
    assert "differ" not in both


class Ranks:
    """Ranks that call collectives of two groups, each in its own order, until none can go on."""

    def __init__(self, programs: list[list[str]]) -> None:
        self._programs = programs
        self._called: list[list[str]] = [[] for _ in programs]
        while any(self._go_on(rank) for rank in range(len(programs))):
            pass

    def _go_on(self, rank: int) -> bool:
        if self.waits(rank) or len(self._called[rank]) == len(self._programs[rank]):
            return False
        self._called[rank].append(self._programs[rank][len(self._called[rank])])
        return True

    def waits(self, rank: int) -> bool:
        """Whether the last collective that it called is not called by all yet."""
        mine = self._called[rank]
        return bool(mine) and any(theirs.count(mine[-1]) < mine.count(mine[-1]) for theirs in self._called)

    def status(self, rank: int) -> RankStatus:
        mine = self._called[rank]
        calls = {group: mine.count(group) for group in "ab"}
        return waits(mine[-1], calls[mine[-1]] - 1, calls=calls) if self.waits(rank) else ended(**calls)


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=4), min_size=2, max_size=4))
def test_every_program_ends_or_is_found_out(programs: list[list[str]]) -> None:
    ranks = Ranks(programs)
    stuck = any(ranks.waits(rank) for rank in range(len(programs)))
    assert (verdict(*(ranks.status(rank) for rank in range(len(programs)))) is not None) == stuck
