from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import FailedPreconditionError
from raydist.replicas.step_message import KeptObjects, SentObjects


def test_what_was_sent_lately_does_not_travel_again() -> None:
    sent, kept = SentObjects(), KeptObjects()
    for refs, travelling in [("a", ["a"]), ("a", []), ("ab", ["b"]), ("b", []), ("c", ["c"]), ("ac", ["a"]), ("", [])]:
        numbers, objects = sent.send(refs)
        assert objects == travelling
        assert kept.receive(numbers, [ref.upper() for ref in objects]) == [ref.upper() for ref in refs]


@given(st.lists(st.one_of(st.none(), st.lists(st.sampled_from("abcdef"), unique=True, max_size=5)), max_size=30))
def test_both_sides_agree_on_any_sequence_and_keep_little(messages: list[list[str] | None]) -> None:
    sent, kept = SentObjects(), KeptObjects()
    for refs in messages:
        if refs is None:
            sent.forget()
            continue
        numbers, objects = sent.send(refs)
        assert kept.receive(numbers, objects) == refs
        assert len(kept._objects) <= 2
        assert len(sent._numbers) <= 2


def test_a_lost_message_is_noticed() -> None:
    sent, kept = SentObjects(), KeptObjects()
    sent.send("a")
    with pytest.raises(FailedPreconditionError, match=r"\[0\] are not here and 0 came along"):
        kept.receive(*sent.send("a"))
    sent.forget()
    assert kept.receive(*sent.send("a")) == ["a"]
