"""The decision after lost replicas, on random schedules of a model of replicas."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

from raydist.replicas.recovery_plan import RecoveryPlan, SurvivorStatus, plan_recovery

# The parts of a step: x exchanges with all, u updates what all hold alike, o changes what the replica alone has.
KINDS = {"train": "oxu", "accumulate": "ox", "evaluate": "o", "gan": "oxuxu", "train without own": "xu"}
NEVER = -1


@dataclass
class Replica:
    """A model of one replica: lists of what has been applied, and a snapshot at its last boundary."""

    alike: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    step: int = 0
    part: int = 0
    shared: int = NEVER
    is_pending: bool = False
    dirty: bool = False
    kept: tuple[int, list[int], list[int], int] = (0, [], [], NEVER)  # step, alike, own, shared
    sent: list[tuple[int, int, list[int]]] = field(default_factory=list)
    early: tuple[int, int, list[int]] | None = None  # sent within a step

    @property
    def copies(self) -> list[tuple[int, int, list[int]]]:
        return [*self.sent, *([] if self.early is None else [self.early])]

    def begin(self) -> None:
        if not self.is_pending:
            self.kept = self.step, list(self.alike), list(self.own), self.shared

    def run(self, kind: str, *, copies: bool) -> None:
        part = KINDS[kind][self.part]
        if part == "o":
            self.own.append(self.step)
        elif part == "x":
            self.gradients.append(self.step)
        elif part == "u":
            self.alike += [self.step, *self.gradients]
            self.gradients = []
            self.dirty |= not copies
        self.part += 1

    def end(self, kind: str) -> None:
        if "x" in KINDS[kind]:
            self.shared = self.step
        self.step, self.part = self.step + 1, 0
        self.is_pending = bool(self.gradients)
        if not self.is_pending:
            self.dirty = False
            if "x" not in KINDS[kind] or not self.is_known:
                self.early = None
                others = [copy for copy in self.sent if copy[1] != self.shared]
                self.sent = [*others, (self.step, self.shared, list(self.own))][-2:]

    @property
    def is_known(self) -> bool:
        """Return True if the neighbour has the present own state, as of the end of a step."""
        return self.early is None and bool(self.sent) and self.sent[-1][2] == self.own

    def status(self) -> SurvivorStatus:
        unfinished = self.part > 0 or self.is_pending
        return SurvivorStatus(
            self.kept[0] if unfinished else self.step, self.kept[3] if unfinished else self.shared, self.dirty
        )

    def go_back(self) -> None:
        if self.part > 0 or self.is_pending:
            self.step, alike, own, self.shared = self.kept
            self.own = list(own)
            if not self.dirty or self.alike == alike:
                self.alike = list(alike)
        self.gradients, self.part, self.is_pending = [], 0, False


class Schedule:
    """Steps of all replicas in a random order, until some are killed and the others can go no further."""

    def __init__(self, draw: random.Random, kinds: list[str], replicas: list[Replica], *, copies: bool) -> None:
        self.draw, self.kinds, self.replicas, self.copies = draw, kinds, replicas, copies
        self.arrived = [0] * len(replicas)  # number of exchanges that each has come to
        self.done = [0] * len(replicas)
        self.killed: set[int] = set()
        self.failed: set[int] = set()

    def run(self) -> set[int]:
        """Return the killed replicas."""
        moves_left = self.draw.randrange(1, 60)
        while True:
            able = [rank for rank in range(len(self.replicas)) if self.is_able(rank)]
            if moves_left <= 0 and not self.killed:
                self.killed = set(
                    self.draw.sample(range(len(self.replicas)), self.draw.randrange(1, len(self.replicas)))
                )
            elif not able:
                return self.killed
            elif (rank := self.draw.choice(able)) in self.waiting() and self.killed and self.draw.random() < 0.3:
                self.failed.add(rank)  # an exchange may fail although all have come to it
            else:
                self.move(rank)
                moves_left -= 1

    def part(self, rank: int) -> str:
        each = self.replicas[rank]
        return KINDS[self.kinds[each.step]][each.part]

    def waiting(self) -> list[int]:
        return [rank for rank, arrived in enumerate(self.arrived) if arrived > self.done[rank]]

    def is_able(self, rank: int) -> bool:
        if rank in self.killed | self.failed or self.replicas[rank].step == len(self.kinds):
            return False
        return rank not in self.waiting() or min(self.arrived) > self.done[rank]

    def move(self, rank: int) -> None:
        each, kind = self.replicas[rank], self.kinds[self.replicas[rank].step]
        if each.part == 0 and rank not in self.waiting():
            each.begin()
        exchanges = self.part(rank) == "x"
        if exchanges and rank not in self.waiting():
            self.arrived[rank] += 1
            if not each.is_known:
                each.early = each.step + 1, each.step, list(each.own)
            return
        self.done[rank] += exchanges
        each.run(kind, copies=self.copies)
        if each.part == len(KINDS[kind]):
            each.end(kind)


def expected(kinds: list[str], step: int) -> list[int]:
    """Return what all hold alike at a boundary before a step of an undisturbed run."""
    alone = Replica()
    for kind in kinds[:step]:
        for _ in KINDS[kind]:
            alone.run(kind, copies=True)
        alone.end(kind)
    return alone.alike


def carry_out(replicas: list[Replica], killed: set[int], plan: RecoveryPlan) -> None:
    """Carry the plan out on the model."""
    copies = {rank: {at: own for at, _, own in replicas[rank].copies} for rank in killed}
    for rank, each in enumerate(replicas):
        if rank not in killed:
            each.go_back()
    for rank, each in enumerate(replicas):
        if rank in killed:
            at = plan.copies[rank]
            each.own = list(copies[rank][at]) if at is not None else []
        elif rank in plan.adopt and each.early is not None and each.early[0] == plan.resume[rank]:
            each.own = list(each.early[2])
        if rank in plan.adopt:
            each.alike = list(replicas[plan.source].alike)
            each.step, each.shared = plan.resume[rank], plan.shared
            each.gradients, each.part, each.is_pending, each.dirty = [], 0, False, False


def send_again(replicas: list[Replica]) -> None:
    """Send each one's own state in the new generation, as at the end of a step."""
    for each in replicas:
        each.early = None
        others = [copy for copy in each.sent if copy[0] < each.step and copy[1] != each.shared]
        each.sent = [*others, (each.step, each.shared, list(each.own))][-2:]


def check(kinds: list[str], replicas: list[Replica], plan: RecoveryPlan) -> None:
    """Check that all continue from a whole state, and that no step counts twice or is lost."""
    for rank, each in enumerate(replicas):
        assert each.step == plan.resume[rank]
        assert each.alike == expected(kinds, each.step)
        assert len(set(each.own)) == len(each.own), "a step counts twice"
        assert all(step < each.step for step in each.own), "a step counts although it runs again"
        missing = [step for step in range(each.step) if "o" in KINDS[kinds[step]] and step not in each.own]
        assert rank in plan.adopt or not missing
        if "accumulate" not in kinds:  # else a replica may have been lost with several steps since its last boundary
            assert not any("x" in KINDS[kinds[step]] for step in missing)
    for step in range(plan.first, len(kinds)):
        again = [rank for rank, at in enumerate(plan.resume) if at <= step]
        assert "x" not in KINDS[kinds[step]] or len(again) == len(replicas), "some would wait for others"


def test_random_schedules_lose_nothing() -> None:
    draw = random.Random(int(os.environ.get("RAYDIST_SEED", "0")))
    schedules, without = int(os.environ.get("RAYDIST_SCHEDULES", "4000")), 0
    for _ in range(schedules):
        size = draw.randrange(2, 5)
        kinds = draw.choices(list(KINDS), k=draw.randrange(1, 8))
        replicas = [Replica() for _ in range(size)]
        copies = draw.random() < 0.8
        for _ in range(draw.randrange(1, 4)):
            killed = Schedule(draw, kinds, replicas, copies=copies).run()
            statuses = {rank: each.status() for rank, each in enumerate(replicas) if rank not in killed}
            sent = {rank: [(at, shared) for at, shared, _ in replicas[rank].copies] for rank in killed}
            plan = plan_recovery(statuses, sent, size)
            if plan is None:
                assert all(each.dirty for each in statuses.values())
                without += 1
                break
            carry_out(replicas, killed, plan)
            check(kinds, replicas, plan)
            send_again(replicas)
    assert without < 0.1 * schedules
