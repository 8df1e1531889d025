"""The decision after replicas were lost: who goes back to which step, and who takes whose state. Pure; knows no Ray.

A *boundary* is the start of a step at which no gradient waits for an optimizer step. A replica keeps what it needs to
go back to its last boundary. Two kinds of steps matter:

- In a step *with an exchange* all replicas take part, so they are at most one such step apart.
- A step *with an update* changes what all replicas hold alike: parameters, states of optimizers.

A replica cannot run a step with an exchange again unless all others do, and a step with an update that others keep is
not run again either: the replica takes the result of that step from a replica that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class SurvivorStatus:
    """The steps of a surviving replica.

    Attributes:
        boundary: The first step since its last boundary, to which it can go back.
        shared: The last step before the boundary with an exchange or an update; -1 for none.
        dirty: True if its unfinished step has changed what all replicas hold alike, and it kept no copy.
    """

    boundary: int
    shared: int = -1
    dirty: bool = False


@final
@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The first step of each replica in the new generation, and the source of its state.

    Attributes:
        resume: The first step that each replica runs again, by rank.
        shared: The last step with an exchange or an update that counts; -1 for none.
        source: The rank of a survivor with the newest state.
        adopt: The ranks that take the source's state: lost ones, and survivors that missed an update.
        copies: For each lost rank, the step of the copy of its own state that it continues from; None for no copy.
    """

    resume: tuple[int, ...]
    shared: int
    source: int
    adopt: frozenset[int]
    copies: Mapping[int, int | None]

    @property
    def first(self) -> int:
        """The first step that any replica runs again."""
        return min(self.resume)


def plan_recovery(
    statuses: Mapping[int, SurvivorStatus], copies: Mapping[int, Sequence[tuple[int, int]]], num_replicas: int
) -> RecoveryPlan | None:
    """Return the plan; None if no survivor has a whole state.

    Args:
        statuses: The survivors by rank.
        copies: For each lost rank, the kept copies of its own state: (boundary, shared) as in `SurvivorStatus`.

    >>> plan_recovery({0: SurvivorStatus(7, 6)}, {1: [(6, 5), (7, 6)]}, 2)
    RecoveryPlan(resume=(7, 7), shared=6, source=0, adopt=frozenset({1}), copies={1: 7})

    Replica 0 has finished step 7, the others have not: they take its result.

    >>> plan_recovery({0: SurvivorStatus(8, 7), 1: SurvivorStatus(7, 6)}, {2: [(7, 6)]}, 3)
    RecoveryPlan(resume=(8, 8, 8), shared=7, source=0, adopt=frozenset({1, 2}), copies={2: 7})
    """
    whole = {rank: each for rank, each in statuses.items() if not each.dirty}
    if not whole:
        return None
    shared = max(each.shared for each in whole.values())
    sources = sorted(rank for rank, each in whole.items() if each.boundary > shared)
    first = shared + 1
    resume: dict[int, int] = {}
    adopt = set()
    for rank, each in statuses.items():
        resume[rank] = max(first, each.boundary)
        if each.dirty or each.boundary <= shared:
            adopt.add(rank)
    chosen: dict[int, int | None] = {}
    for rank in sorted(set(range(num_replicas)) - set(statuses)):
        # A copy from after an exchange that the survivors have not done is too new: all run that step again.
        usable = [boundary for boundary, its in copies.get(rank, ()) if its <= shared]
        chosen[rank] = max(usable, default=None)
        resume[rank] = max(first, chosen[rank] or 0)
        adopt.add(rank)
    ordered = tuple(resume[rank] for rank in range(num_replicas))
    return RecoveryPlan(ordered, shared, sources[0], frozenset(adopt), chosen)
