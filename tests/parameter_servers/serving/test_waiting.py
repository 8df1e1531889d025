from __future__ import annotations

from raydist.parameter_servers.requests import ServerAnswer
from raydist.parameter_servers.serving.changes import Answered, Waits


def test_each_is_answered_once_it_may_be_and_once() -> None:
    waits = Waits()
    opened: set[str] = set()

    def wait_for(name: str) -> object:
        return waits.add(lambda: name in opened, lambda: (ServerAnswer(value=name), []))

    first, second, third = (wait_for(name) for name in "abc")
    opened |= {"c", "a"}
    due = waits.due()
    assert [later for later, _ in due] == [first, third]
    assert [told[0].value for _, told in due if not isinstance(told, Exception)] == ["a", "c"]
    assert waits.due() == []
    assert len(waits) == 1
    opened.add("b")
    assert [later for later, _ in waits.due()] == [second]


def test_an_answer_that_fails_is_its_requests() -> None:
    def fail() -> Answered:
        raise KeyError("gone")

    waits = Waits()
    waits.add(lambda: True, fail)
    waits.add(lambda: True, lambda: (ServerAnswer(), []))
    errors = [told for _, told in waits.due() if isinstance(told, Exception)]
    assert repr(errors) == "[KeyError('gone')]"
    assert len(waits) == 0
