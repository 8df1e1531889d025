from __future__ import annotations

from raydist.actors.step_head import DONE, HEAD, KEPT, LEAVE, MOST_BYTES, STEPS, answered_by, wants_answer
from raydist.channels.layout import MESSAGE_BYTES


def test_steps_are_answered_under_their_number_and_the_word_to_leave_is_not() -> None:
    assert wants_answer(HEAD.pack(STEPS, 7) + b"steps") == 7
    assert wants_answer(HEAD.pack(LEAVE, 7)) is None


def test_an_answer_tells_whether_it_holds_the_result() -> None:
    assert answered_by(HEAD.pack(DONE, 1 << 40) + b"result") == (1 << 40, False)
    assert answered_by(HEAD.pack(KEPT, 3)) == (3, True)


def test_the_largest_message_fits_in() -> None:
    assert HEAD.size + MOST_BYTES == MESSAGE_BYTES
