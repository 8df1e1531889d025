"""Steps that were sent in one message to each replica, and what is known of their results. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, final

from raydist.core.errors import CancelledError, InvalidArgumentError
from raydist.core.exception_utils import describe, what_was_raised
from raydist.mirroring.messages import StepPayload
from raydist.replicas.batching_policy import MOST_STEPS
from raydist.replicas.results import StepResult
from raydist.replicas.step_message import GroupResult, PlannedStep


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """A step that failed. The replicas refuse all steps after it."""

    step: int
    error: Exception

    def consequence(self, step: int) -> CancelledError:
        """Return the error of a step after the failed one."""
        error = CancelledError(
            f"Step {step} was given up, because step {self.step} failed ({describe(self.error)}). The first error is "
            "the cause of this one: mend that."
        )
        error.__cause__ = what_was_raised(self.error)
        return error


@final
@dataclass(slots=True, eq=False)
class SentPlace:
    """The group in which a step was sent, and its position there; no group before it is sent."""

    group: SentGroup | None = None
    place: int = 0


@final
@dataclass(slots=True)
class Dispatched:
    """A step on the driver, from its dispatch until no recovery needs it any more."""

    planned: PlannedStep
    sent: SentPlace | None  # None if its results are known, and it only runs again
    # results that replicas had delivered before another one was lost, by rank
    earlier: dict[int, StepResult] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.planned.header.step

    def repeated(self) -> Dispatched:
        """Return this step, whose results are known, as one that runs again: without its checkpoints."""
        header = self.planned.header
        if header.loop is None:
            return self
        return replace(
            self, planned=replace(self.planned, header=replace(header, loop=replace(header.loop, is_repeated=True)))
        )

    def given_up(self) -> Dispatched:
        """Return this step, which failed or followed one that failed, as one that only brings what later steps need."""
        header = self.planned.header
        payload = header.payload.without_step() or StepPayload()
        kept = replace(header, payload=payload, sources=(), rows=None, loop=None, is_given_up=True)
        return Dispatched(PlannedStep(kept), None)


@final
class SentGroup:
    """Steps that were sent in one message to each replica, and their results once these are known.

    `refs` has the answers by rank: None for a replica that has done these steps already, or cannot.
    """

    def __init__(self, steps: Sequence[Dispatched], refs: Sequence[Any]) -> None:
        self.steps = tuple(steps)  # empty once they are done
        self.first_step = steps[0].number
        self.keys = tuple(each.planned.header.payload.digest for each in steps)
        self.refs = tuple(refs)
        # the results of every replica, or the error, of each step; empty until these are known
        self.outcomes: list[list[StepResult] | Exception] = []
        # the first step that failed, in this or an earlier group; None without a failure
        self.cause: Failure | None = None
        self._none_given = tuple(each.planned.returns_none for each in steps)

    @property
    def title(self) -> str:
        """The step numbers, for messages."""
        last = self.first_step + len(self.keys) - 1
        return f"step {last}" if last == self.first_step else f"steps {self.first_step} to {last}"

    def succeed(self, answers: Sequence[GroupResult | None]) -> InvalidArgumentError | None:
        """Record the results. Return the error of a step that returned a value although `run` had returned None."""
        self.outcomes = [self._results(place, answers) for place in range(len(self.keys))]
        for place, none_given in enumerate(self._none_given):
            if none_given and not all(each.is_none or each.absent for each in self.results_at(place)):
                return InvalidArgumentError(
                    f"A step function that returned None must do so in every call, but step {self.first_step + place} "
                    "returned a value, and `run` had returned None by then. Return a value always, or another function."
                )
        return None

    def _results(self, place: int, answers: Sequence[GroupResult | None]) -> list[StepResult]:
        """Return the results of one step by rank; those that were lost are absent."""
        earlier = self.steps[place].earlier
        found = {rank: each.results[place] for rank, each in enumerate(answers) if each and len(each.results) > place}
        known = {**earlier, **found}
        if len(known) == len(answers):
            return [known[rank] for rank in range(len(answers))]
        some = next(iter(known.values()))
        return [known.get(rank) or some.as_absent() for rank in range(len(answers))]

    def fail(self, error: Exception, answers: Sequence[GroupResult | None]) -> Exception:
        """Record that a step failed on some replica, and return its error."""
        done = min([len(self.keys) - 1, *(len(each.results) for each in answers if each is not None)])
        if self.cause is not None and isinstance(error, CancelledError):
            error = self.cause.consequence(self.first_step + done)
        failure = self.cause = self.cause or Failure(self.first_step + done, error)
        self.outcomes = [self._results(place, answers) for place in range(done)]
        self.outcomes += [error, *(failure.consequence(self.first_step + n) for n in range(done + 1, len(self.keys)))]
        return error

    def end_before(self, step: int, answers: Sequence[GroupResult | None]) -> list[Dispatched]:
        """Record the results of the steps before `step`; return the others, with what is known of their results."""
        place = max(0, min(step - self.first_step, len(self.keys)))
        self.outcomes = [self._results(each, answers) for each in range(place)]
        rest = list(self.steps[place:])
        for number, each in enumerate(rest, place):
            for rank, answer in enumerate(answers):
                if answer is not None and len(answer.results) > number:
                    each.earlier[rank] = answer.results[number]
        self.keys, self.steps = self.keys[:place], self.steps[:place]
        return rest

    def num_lost(self, answers: Sequence[GroupResult | None]) -> int:
        """Return how many results of the ended steps nobody has."""
        held = [0 if answer is None else len(answer.results) for answer in answers]
        places = [set(range(len(held))) - each.earlier.keys() for each in self.steps]
        return sum(held[rank] <= place for place, ranks in enumerate(places) for rank in ranks)

    def results_at(self, place: int) -> list[StepResult]:
        """Return every replica's result of the step at `place`; raises the step's error."""
        outcome = self.outcomes[place]
        if isinstance(outcome, Exception):
            raise what_was_raised(outcome).with_traceback(None)
        return outcome


def by_ranks(steps: Sequence[Dispatched], resume: Sequence[int]) -> Iterator[tuple[list[int], list[Dispatched]]]:
    """Cut steps into groups that go to the same replicas: to those that resume at or before them."""
    for ranks, group in groupby(steps, key=lambda each: [rank for rank, at in enumerate(resume) if at <= each.number]):
        found = list(group)
        for start in range(0, len(found), MOST_STEPS):
            yield ranks, found[start : start + MOST_STEPS]
