from __future__ import annotations

from raydist.actors.portable_errors import PortableError
from raydist.replicas.group_member import Refusals


def told(refusals: Refusals, step: int) -> str:
    found = refusals.of(step)
    assert isinstance(found, PortableError)
    return repr(found.restore())


def test_a_save_behind_a_failed_step_has_its_error() -> None:
    refusals = Refusals(0)
    refusals.failed(3, ValueError("bad row"))
    refusals.note(4)
    assert "bad row" in told(refusals, 4)
    assert (refusals.of(3), refusals.of(5)) == (None, None)


def test_a_save_behind_another_replicas_failure_was_given_up() -> None:
    refusals = Refusals(0)
    refusals.note(4)
    assert "Step 4 was given up: another replica failed." in told(refusals, 4)


def test_the_next_generation_forgets_the_failure_and_keeps_what_was_refused() -> None:
    refusals = Refusals(0)
    refusals.failed(3, ValueError("bad row"))
    refusals.note(4)
    refusals.restart()
    assert refusals.failed_step is None
    assert "bad row" in told(refusals, 4)
    refusals.note(6)
    assert "another replica failed" in told(refusals, 6)


def test_the_last_few_are_kept() -> None:
    refusals = Refusals(0)
    for step in range(20):
        refusals.note(step)
    assert [step for step in range(20) if refusals.of(step) is not None] == list(range(12, 20))
